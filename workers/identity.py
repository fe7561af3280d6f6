"""Who a worker is and what its model needs of the engine, read from the checkpoint once at start."""

from dataclasses import dataclass

from headrace.blocks import HASH_VERSION
from headrace.errors import ConfigError
from headrace.values import Capacity, Compatibility, WorkerInfo
from workers.models.checkpoint import Checkpoint
from workers.ranks.executor import Executor
from workers.spec import WorkerSpec


@dataclass(frozen=True, slots=True)
class Identity:
    """`max_context_tokens` is what this worker serves: the model's own, or less by configuration."""

    compatibility: Compatibility
    vocab_size: int
    max_context_tokens: int
    eos_ids: tuple[int, ...]

    @classmethod
    def of(cls, spec: WorkerSpec) -> "Identity":
        """CheckpointError or ConfigError, naming the field."""
        checkpoint = Checkpoint.open(spec.model_path)
        config, engine = checkpoint.config, spec.engine
        context = engine.max_context_tokens or config.max_context_tokens
        if context > config.max_context_tokens:
            raise ConfigError.out_of_range(
                "max_context_tokens", context, f"at most the model's {config.max_context_tokens}"
            )
        compatibility = Compatibility(
            model=spec.model_path.rstrip("/").rsplit("/", 1)[-1],
            revision=checkpoint.revision,
            tokenizer=checkpoint.tokenizer_digest,
            chat_template=checkpoint.chat_template_digest,
            dtype=engine.dtype,
            kv_dtype=engine.dtype,
            block_size=engine.block_size,
            hash_version=HASH_VERSION,
        )
        return cls(compatibility, config.vocab_size, context, config.eos_ids)

    def info(self, spec: WorkerSpec, executor: Executor, address: str) -> WorkerInfo:
        return WorkerInfo(
            worker_id=spec.worker_id,
            generation=spec.generation,
            role=spec.role,
            address=address,
            compatibility=self.compatibility,
            layout=executor.layout,
            capacity=Capacity(
                num_blocks=executor.num_blocks,
                block_bytes=executor.block_bytes,
                max_num_seqs=spec.engine.max_num_seqs,
                max_context_tokens=self.max_context_tokens,
                max_step_tokens=spec.engine.max_step_tokens,
                vocab_size=self.vocab_size,
            ),
            model_path=spec.model_path,
            node=spec.node,
            revision=spec.revision,
        )
