"""Small checkpoint folders with real tokenizers of the two kinds that are served, made in memory-sized form."""

import json
import pathlib

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

CORPUS = [
    "The quick brown fox jumps over the lazy dog. The capital of France is Paris.",
    "Ça va? Größe, naïve café — 日本語のテキスト, 中文, русский, 🙂🚀👩‍🚀",
    'def add(a, b):\n    return a + b\n\n{"name": "add", "arguments": {"a": 1}}',
    "User: hello\nAssistant: hi there\nUser: what now?",
]
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def byte_level() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=420,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    return tokenizer


def sentencepiece() -> Tokenizer:
    vocab = {token: at for at, token in enumerate(["<unk>", "<s>", "</s>"])}
    for byte in range(256):
        vocab[f"<0x{byte:02X}>"] = len(vocab)
    for character in sorted({c for text in CORPUS[:1] for c in text.replace(" ", "\N{LOWER ONE EIGHTH BLOCK}")}):
        vocab.setdefault(character, len(vocab))
    merges = [("T", "h"), ("Th", "e"), ("\N{LOWER ONE EIGHTH BLOCK}", "The"), ("o", "x"), ("f", "ox")]
    for left, right in merges:
        vocab.setdefault(left + right, len(vocab))
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges, byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("\N{LOWER ONE EIGHTH BLOCK}", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    return tokenizer


def write(folder: pathlib.Path, tokenizer: Tokenizer, chat_template: object = CHATML) -> pathlib.Path:
    """A checkpoint folder as far as text needs one."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<|im_start|>",
        "eos_token": {"content": "<|im_end|>", "special": True, "__type": "AddedToken"},
        "clean_up_tokenization_spaces": False,
        "chat_template": chat_template,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder
