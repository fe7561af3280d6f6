.DEFAULT_GOAL := help
SHELL := /bin/bash
PYTHON ?= python3
GPU_PYTHON ?= python3
PY := $(if $(HEADRACE_VENV),$(HEADRACE_VENV),.venv)/bin
export PYTHONPATH := $(CURDIR):$(CURDIR)/proto$(if $(PYTHONPATH),:$(PYTHONPATH))
export RAY_AUTH_MODE ?= disabled

help:  ## this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | column -t -s "$$(printf '\t')"

setup: $(PY)/headrace  ## the virtual environment, with torch for the CPU and everything that tests need

$(PY)/headrace: pyproject.toml constraints.txt tools/setup.sh
	PYTHON="$(PYTHON)" bash tools/setup.sh $(PY)/..
	@touch $@

protocol: setup  ## regenerate the code of proto/headrace/v1
	$(PY)/python tools/generate_protocol.py

lint: setup  ## ruff, mypy, import-linter, generated code and chart
	$(PY)/ruff format --check .
	$(PY)/ruff check .
	$(PY)/python tools/generate_protocol.py --check
	$(PY)/python tools/generate_chart.py --check
	$(PY)/lint-imports
	$(PY)/mypy

unit: setup  ## unit tests, without those that need the small model or interpret kernels
	$(PY)/pytest tests/unit -q -n 2 -m "not model and not interpreter"

check: lint unit  ## what a commit must pass; about two minutes on two cores that do nothing else

test: setup  ## everything that needs no GPU
	$(MAKE) -j 2 --output-sync lint model
	$(PY)/pytest tests/unit -q -n 2
	$(PY)/pytest tests -q --ignore=tests/unit --ignore=tests/gpu --ignore=tests/helm

helm-test: setup  ## the chart, with a real helm, promtool and hadolint (fetched once, into .headrace/tools)
	bash tools/helm_tools.sh $(PY)/python
	$(PY)/pytest tests/helm -q

helm-docs: setup  ## the chart's README, schema and dashboards, and the page on these, from what they are made of
	$(PY)/python tools/generate_chart.py

model: setup  ## fetch SmolLM2-135M-Instruct once, as an ordinary checkpoint folder
	$(PY)/headrace model fetch smollm2-135m-instruct --to models/smollm2-135m-instruct

demo: setup model  ## one command: a real model through prefill and decode workers on this machine (KEEP=1 leaves it serving)
	$(PY)/headrace demo $(if $(KEEP),--keep)

bench-stream: setup  ## what a router costs between a worker and 256 streams, beside a bare gRPC server (GATE=1 fails on a miss)
	$(PY)/python -m loadtests.bench_stream --out docs/benchmarks/stream-cpu.json $(if $(GATE),--gate)

bench-router: setup  ## what the index and a placement cost, in time and memory (GATE=1 fails on a miss)
	$(PY)/python -m loadtests.bench_router --out docs/benchmarks/router-cpu.json $(if $(GATE),--gate)

bench-sim: setup  ## 1,000 virtual workers and 100,000 requests on one core; hot prefixes and ties (GATE=1 fails on a miss)
	$(PY)/python -m loadtests.bench_sim --out docs/benchmarks/sim-cpu.json $(if $(GATE),--gate)

bench-operate: setup  ## what it costs to run a cluster: controller, planner, load generator, metrics (ONLY=a row; GATE=1 fails on a miss)
	$(PY)/python -m loadtests.bench_operate $(if $(ONLY),$(addprefix --only ,$(ONLY)),--out docs/benchmarks/operate-cpu.json) $(if $(GATE),--gate)

gpu-test:  ## the kernels, the engine, the links and parallel ranks on one CUDA device or two, with the host's own Python
	$(GPU_PYTHON) -m pytest -c /dev/null --rootdir=. -p no:cacheprovider -q tests/gpu tests/contract/test_kv_link.py tests/contract/test_kv_link_peers.py

gpu-day:  ## all that GPUs are for, in the order of its worth; each part once, within SECONDS=560 a call; goes on where it was cut (TRACES=… PEER="…" PAIR_PEER="…" PACK=FILE.tgz)
	$(GPU_PYTHON) -m loadtests.gpu_day --seconds $(or $(SECONDS),560) $(if $(TRACES),--traces $(TRACES)) \
		$(if $(PEER),--peer "$(PEER)") $(if $(PAIR_PEER),--pair-peer "$(PAIR_PEER)") $(if $(PACK),--pack $(PACK))

bench-reshard:  ## pulls between 2×1 and 1×1 workers, on three CUDA devices (GATE=1 fails on a miss)
	$(GPU_PYTHON) -m loadtests.bench_reshard --out docs/benchmarks/handoff-reshard-$(or $(CARD),h200).json $(if $(GATE),--gate)

gpu-sanitize:  ## attention and the KV write under compute-sanitizer, on a host that allows it (fmha: the reference's own)
	for tool in memcheck racecheck; do PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --tool $$tool --error-exitcode 1 \
		--kernel-name-exclude kernel_substring=fmha $(GPU_PYTHON) -m pytest -c /dev/null --rootdir=. -p no:cacheprovider \
		-q tests/gpu/test_kernels.py -k "$(or $(K),decode_shapes or over_parts or rope_store or gather_row)" || exit 1; done

bench-kernels:  ## each kernel against the card's own limits; the pull too where there are two devices
	$(GPU_PYTHON) -m loadtests.bench_kernels
	@if [ "$$(nvidia-smi -L | wc -l)" -ge 2 ]; then CUDA_VISIBLE_DEVICES=0 $(GPU_PYTHON) -m loadtests.bench_kernels --pull; fi

# What takes a GPU host longer than one call may: each part is done once, and the same command goes on where it was cut.
GPU_DONE := .headrace/gpu-done
MULTI_TESTS := $(addprefix tests/,$(addsuffix .py,gpu/test_pair gpu/test_link gpu/test_sums gpu/test_parallel gpu/test_deterministic \
	gpu/test_profile contract/test_kv_link contract/test_kv_link_peers))

gpu-test-multi: $(MULTI_TESTS:%=$(GPU_DONE)/%)  ## hand-off, links and parallel ranks on two CUDA devices, their answers and profiles, a file at a time; goes on where it was cut (make gpu-again begins anew)

$(MULTI_TESTS:%=$(GPU_DONE)/%): $(GPU_DONE)/%:
	$(GPU_PYTHON) -m pytest -c /dev/null --rootdir=. -p no:cacheprovider -q $*
	@mkdir -p $(@D) && touch $@

gpu-again:  ## forgets what gpu-test-multi and bench-handoff have done
	rm -rf $(GPU_DONE)

bench-handoff: $(addprefix $(GPU_DONE)/,bench-pull-alone bench-pair bench-link)  ## everything about the hand-off on two CUDA devices; goes on where it was cut (GATE=1 fails on a miss)

$(addprefix $(GPU_DONE)/,bench-pull-alone bench-pair bench-link): $(GPU_DONE)/%:
	$(MAKE) $*
	@mkdir -p $(@D) && touch $@

bench-pull-alone:  ## pulls over the nvlink link between two CUDA devices, alone and beside decode steps (GATE=1 fails on a miss)
	CUDA_VISIBLE_DEVICES=0 $(GPU_PYTHON) -m loadtests.bench_handoff --source-device 1 \
		--out docs/benchmarks/handoff-$(or $(CARD),h200).json $(if $(GATE),--gate)

bench-pair:  ## a prefill and a decode worker as whole processes on two CUDA devices: hand-over, TTFT, ITL; twice, the second launching late (VLLM=bench_vllm_pd's lines; GATE=1 fails on a miss)
	$(GPU_PYTHON) -m loadtests.bench_pair --out docs/benchmarks/handoff-pair-$(or $(CARD),h200).json \
		$(if $(VLLM),--vllm $(VLLM)) $(if $(GATE),--gate)

bench-disagg:  ## one aggregated pool, tuned, against prefill and decode pools on the same CUDA devices (GPUS=2 TRACES=azure=… ARGS=…); 9 minutes a call, goes on where it was
	$(GPU_PYTHON) -m loadtests.disagg --gpus $(or $(GPUS),2) --traces $(or $(TRACES),azure=examples/azure_sample.csv) \
		--seconds 500 --state docs/benchmarks/disagg-$(or $(CARD),h200).jsonl \
		--out docs/benchmarks/disagg-$(or $(CARD),h200).json $(ARGS)

plan-measured: setup  ## the planner's model beside what bench-disagg's runs did, and the cards from docs/benchmarks (CARD=h200 TRACES=…)
	$(PY)/python -m cluster.planning.measured --gpu $(or $(CARD),h200) --runs docs/benchmarks/disagg-$(or $(CARD),h200).jsonl \
		$(if $(TRACES),--traces $(TRACES)) --commit "$$(git rev-parse --short HEAD)" \
		--out docs/benchmarks/plan-measured-$(or $(CARD),h200).json
	$(PY)/python -m cluster.simulation.cards.measure

bench-link:  ## an nccl link between two CUDA devices: rate, memory, how it ends, and which settings are the fastest there (GATE=1 fails on a miss)
	CUDA_VISIBLE_DEVICES=0 $(GPU_PYTHON) -m loadtests.bench_link --scheme nccl --sweep \
		--out docs/benchmarks/link-$(or $(CARD),h200).json $(if $(GATE),--gate)

bench-parallel:  ## tensor and pipeline parallel ranks on two CUDA devices, 70B shape cut to 20 layers (GATE=1 fails on a miss)
	$(GPU_PYTHON) -m loadtests.bench_parallel --out docs/benchmarks/parallel-$(or $(CARD),h200).json $(if $(GATE),--gate)

bench-gpu:  ## the engine on one CUDA device, Llama-3.1-8B shape (PEER=another engine's rows; GATE=1 fails on a miss)
	$(GPU_PYTHON) -m loadtests.bench_gpu --out docs/benchmarks/engine-$(or $(CARD),h200).json \
		$(if $(PEER),--peer $(PEER)) $(if $(GATE),--gate)

bench-engine: setup  ## what scheduling, bookkeeping and KV blocks cost beside the model (TRACE=a file; GATE=1 fails on a miss)
	$(PY)/python -m loadtests.bench_engine --out docs/benchmarks/engine-cpu.json $(if $(TRACE),--trace $(TRACE)) $(if $(GATE),--gate)

.PHONY: gpu-day bench-reshard gpu-test-multi gpu-again bench-pull-alone helm-test helm-docs bench-disagg plan-measured bench-link bench-pair bench-gpu bench-operate bench-parallel bench-handoff bench-router bench-sim bench-stream gpu-sanitize gpu-test bench-kernels help setup protocol lint unit check test model demo bench-engine
