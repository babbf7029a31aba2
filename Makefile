# Every verb here is what CI runs. `make run` and `make test` need nothing but Python 3.11 or later.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
KERNELS := $(VENV)/.kernels
PROTO := protos/paceline/v1/worker.proto

.PHONY: setup run test test-all families check types imports stubs sim bench chaos soak protos lock structure
.DEFAULT_GOAL := run

setup: $(KERNELS)

PIP := $(BIN)/pip install --disable-pip-version-check
BEGAN := $(shell date +%s)

# torch is fetched first: of several builds, pip would prefer one whose link names a hash to the one in a folder for CPUs.
$(READY): requirements.lock torch.lock cuda.lock pyproject.toml
	@echo "Setting up $(VENV), once: some minutes for about 1 GB of packages (3 GB where PyTorch comes with CUDA)."
	$(PYTHON) -m venv $(VENV)
	$(PIP) --require-hashes --no-deps -r requirements.lock
	$(BIN)/pip download --disable-pip-version-check --no-deps --dest $(VENV)/torch $$(grep --only-matching '^torch==[^ ]*' torch.lock)
	$(PIP) --require-hashes --no-deps --no-index --find-links $(VENV)/torch -r torch.lock
	rm -r $(VENV)/torch
	if $(BIN)/pip show torch | grep '^Requires:.*cuda-toolkit' > /dev/null; then $(PIP) --require-hashes --no-deps -r cuda.lock; fi
	PYTHONWARNINGS=ignore $(PIP) --quiet --no-deps --no-build-isolation --editable .
	@echo "$(VENV) is set up, in $$(( $$(date +%s) - $(BEGAN) )) seconds."
	@touch $@

# What CPU workers compute with, so that none waits for the compiler, and none goes without where it may not write.
$(KERNELS): $(READY) engine/cpu/library.py $(wildcard engine/cpu/*.cpp engine/cpu/*.h)
	PYTHONWARNINGS=ignore $(BIN)/python -m engine.cpu.library
	@touch $@

run: setup
	$(BIN)/paceline up --stretched --demo $(ARGS)

# Two processes: one for the tests that start clusters, file by file the rest. One, and only the files that may have
# them, for a few: make test ARGS="-k name"
test: setup
	$(BIN)/python -m pytest -n auto --no-loadscope-reorder $(ARGS)

# As well what takes long and rarely fails alone: most faults, more cases and larger samples. CI runs this.
test-all: setup
	$(BIN)/python -m pytest -n auto --no-loadscope-reorder -m "not families and not quick" $(ARGS)

# Every model family that is known to work, or not to, as tiny random models; six of them are in `make test`.
families: setup
	$(BIN)/python -m pytest -m families tests/unit/engine/test_families.py $(ARGS)

# Types beside all the rest: they take as long.
check: setup
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(MAKE) --no-print-directory --jobs 2 types imports stubs

types: setup
	$(BIN)/mypy

imports: setup
	$(BIN)/lint-imports

stubs: setup
	$(BIN)/python -m protos.generate --check

# How large the code is, and what of it is too large. Kept in docs/structure.md: make structure ARGS=--write
structure: setup
	$(BIN)/python -m tests.structure $(ARGS)

sim: setup
	$(BIN)/python -m tests.faults.run --seeds 2000 $(ARGS)

# The engine, and the ways to draft without a small sibling. Another benchmark: make bench ARGS="speculation --quick"
bench: setup
ifdef ARGS
	$(BIN)/paceline bench $(ARGS)
else
	$(BIN)/paceline bench engine --quick
	$(BIN)/paceline bench drafting --quick
endif

# What faults do to streams, on a Ray cluster of pretend nodes: make chaos ARGS="--only kill-target"
chaos: setup
	$(BIN)/paceline bench chaos $(ARGS)

# Random faults for half an hour: make soak ARGS="--minutes 2"
soak: setup
	$(BIN)/paceline bench soak $(ARGS)

protos: setup
	$(BIN)/python -m protos.generate

# After changing versions by hand in a fresh environment. The hashes are those of all files that PyPI has of a version,
# and for torch of those of its own index for CPUs as well; what the build on PyPI takes of CUDA is in cuda.lock.
COMPILE := $(BIN)/uv pip compile --quiet --universal --python-version 3.11 --generate-hashes --no-annotate --no-header
lock:
	$(BIN)/pip freeze --all | grep -v -E '^(pip|wheel|-e)|paceline' | sed 's/+cpu//' > $(VENV)/frozen
	grep '^torch==' $(VENV)/frozen > $(VENV)/pinned
	for index in https://pypi.org/simple https://download.pytorch.org/whl/cpu; do \
	  $(COMPILE) --no-deps --index-url $$index $(VENV)/pinned || exit; \
	done | grep --only-matching 'sha256:[0-9a-f]*' | sort --unique > $(VENV)/hashes
	{ cat $(VENV)/pinned; sed 's/^/    --hash=/' $(VENV)/hashes; } | sed '$$!s/$$/ \\/' > torch.lock
	$(COMPILE) --default-index https://pypi.org/simple $(VENV)/pinned \
	  | awk '/^[a-z]/ { cuda = /^(cuda|nvidia|triton)/ } cuda' > cuda.lock
	grep -v -E '^(torch==|cuda-|nvidia-|triton)' $(VENV)/frozen | $(COMPILE) --no-deps --output-file requirements.lock -
	$(BIN)/python -m deploy.docker.requirements > deploy/docker/requirements.txt
