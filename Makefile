# Every target sets itself up in .venv; a fresh clone needs nothing but python3, pip and make.

PYTHON ?= python3
PY := .venv/bin/python
READY := .venv/.ready
PEERS := .venv/peers/.ready
OLDER := .venv/peers-dlrover/.ready
ALIVE := build/peers-torchft/.ready build/peers-inprocess/.ready
SOURCES = $(wildcard holdfast tests examples benchmarks)
# A name starting with an underscore is a part of other benchmarks, not one itself. Those in SLOW run only by name.
SLOW ?= torture detect elastic_steps recovery ettr byterobust nccl compile cluster hostile older
BENCHES = $(filter-out $(SLOW),$(patsubst benchmarks/%.py,%,$(wildcard benchmarks/[a-z]*.py)))

.DEFAULT_GOAL := help
.PHONY: help venv demo page-pictures test test-full test-search test-slurm test-kube test-trainers fuzz chaos gpu-wheels gpu-lab site lint lock audit bench clean always
# Tests and benchmarks start processes by the dozen; two of them side by side disturb each other.
.NOTPARALLEL:

help: ## show this
	@awk -F ':.*## ' '/^[a-z%-]+:.*## /{printf "  make %-13s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

venv: $(READY) ## make or refresh .venv

# torch first and alone: resolved together with the rest, pip might settle on another build than the pinned one.
# LOCKED=1: files whose hashes are in locked.txt, and no others; but for torch, whose builds differ by where they come from.
$(READY): pyproject.toml constraints.txt
	@command -v $(PYTHON) >/dev/null || { echo "holdfast: there is no $(PYTHON) here; install Python 3.11 or newer (Debian: apt-get install python3 python3-venv)." >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "holdfast: $(PYTHON) is older than Python 3.11; name a newer one, as in: make PYTHON=python3.11." >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || { echo "holdfast: $(PYTHON) cannot make virtual environments; install its venv package (Debian: apt-get install python3-venv)." >&2; exit 1; }
	$(PYTHON) -m venv .venv
ifdef LOCKED
	$(PY) -m pip install --quiet --no-deps --require-hashes -r locked.txt
endif
	$(PY) -m pip install --quiet -c constraints.txt torch
	$(PY) -m pip install --quiet -c constraints.txt $(if $(LOCKED),--no-build-isolation) -e '.[test]'
	@touch $@

demo: $(READY) ## train a small GPT, kill a rank, lose a node, compare the weights
	$(PY) examples/demo.py $(ARGS)

# Who changes the page looks at these; docs/page-*.png come from there.
page-pictures: $(READY) ## build/page: pictures of every view of the page, for eyes; needs Debian's chromium
	$(PY) -m pip install --quiet -c constraints.txt playwright
	$(PY) -m tests.cli.page_pictures $(ARGS)

# Four workers on two cores: end-to-end tests wait for half of their time. What all of them import is compiled once.
test: $(READY) ## all tests but the slow ones; ARGS goes to pytest
	@$(PY) -m compileall -q -j 2 holdfast
	$(PY) -m pytest -n 4 --dist worksteal -m "not slow" -p tests.resuming --record=.pytest_cache/passed $(ARGS)

# But for those that have a target of their own: searches, Slurm and Kubernetes.
test-full: $(READY) ## all tests but the searches; what has passed with the same files, also in make test, is left out
	$(PY) -m pip install --quiet -c constraints.txt -e '.[test-full]'
	$(PY) -m pytest -n 3 --dist worksteal -m "not alone and not search" --ignore=tests/slurm -p tests.resuming --resume=.pytest_cache/passed $(ARGS)
	$(PY) -m pytest -m alone -p tests.resuming --resume=.pytest_cache/passed-alone $(ARGS)

test-search: $(READY) ## seeds by the hundred: planted bugs are looked for, journals harmed; it goes on where it was
	$(PY) -m pytest -n 3 --dist worksteal -m search -p tests.resuming --resume=.pytest_cache/passed-search $(ARGS)

test-slurm: $(READY) ## faults on a real Slurm of six hosts in namespaces; needs root and Debian's packages
	@$(PY) -c 'from tests.slurm.lab import lacking; import sys; sys.exit(f"holdfast: no Slurm can run here: {lacking()}" if lacking() else 0)'
	$(PY) -m pytest tests/slurm tests/fleet/test_contract.py $(ARGS)

# A real API server, built from Debian's source once: five minutes on two quiet cores.
KUBE ?= $(HOME)/.cache/holdfast/kube

test-kube: $(READY) ## pods on a real Kubernetes API server, which is built the first time; ARGS goes to pytest
	test -x $(KUBE)/kube-apiserver || tests/kube/build_cluster.sh $(KUBE)
	PYTEST_HOLDFAST_KUBE=$(KUBE) $(PY) -m pytest tests/kube $(ARGS)

TRAINERS := .venv/trainers

$(TRAINERS)/.ready: tests/trainers/libraries.txt pyproject.toml | $(READY)
	$(PYTHON) -m venv $(TRAINERS)
	$(TRAINERS)/bin/pip install --quiet "$$(grep -m 1 '^torch==' constraints.txt)"
	$(TRAINERS)/bin/pip install --quiet -e '.[test]' -r tests/trainers/libraries.txt
	@touch $@

test-trainers: $(TRAINERS)/.ready ## jobs of DeepSpeed, Megatron, TorchTitan and others, with W&B, MLflow, TensorBoard; ARGS goes to pytest
	$(TRAINERS)/bin/python -m pytest -n 2 --dist worksteal tests/trainers tests/public tests/cli/test_run_trackers.py \
	    tests/cli/test_run_logged_losses.py tests/client/test_tracker_events.py tests/client/test_tracker_hooks.py \
	    tests/client/test_logger_hooks.py $(ARGS)

# Seconds of all tests together; two of them run side by side.
FUZZ_S ?= 1000

fuzz: $(READY) ## every decoder against damaged and hostile bytes, for ten minutes; ARGS goes to pytest
	PYTEST_HOLDFAST_FUZZ=$(FUZZ_S) $(PY) -m pytest -q -n 2 tests/fuzz $(ARGS)

chaos: $(READY) ## the matrix of faults, and docs/FAULTS.md; what passed at this commit is left out; ARGS goes to it
	$(PY) -m holdfast.chaos.matrix run $(ARGS); code=$$?; $(PY) -m holdfast.chaos.matrix table; exit $$code

gpu-wheels: $(READY) ## build/gpu-lab: what a GPU machine's own Python lacks; GPU_PYTHON=312 GPU_MACHINE=x86_64
	.ci/gpu-wheels

# On a machine with a GPU, on its own Python and torch: no environment is made there.
gpu-lab: ## faults over NCCL on this machine's GPU: PYTHON=... names a Python whose torch has CUDA
	@$(PYTHON) -c 'import sys, torch; sys.exit(not torch.cuda.is_available())' 2>/dev/null || { echo "holdfast: the GPU lab cannot run here: $(PYTHON) has no torch that sees a GPU; name one that has, as in: make gpu-lab PYTHON=/opt/venv/bin/python." >&2; exit 1; }
	@test -d build/gpu-lab || { echo "holdfast: build/gpu-lab is not there; fill it by 'make gpu-wheels' on a machine with a network, and bring it along." >&2; exit 1; }
	PYTHONPATH=$(CURDIR):$(CURDIR)/build/gpu-lab PATH=$(CURDIR)/build/gpu-lab/bin:$$PATH $(PYTHON) benchmarks/nccl.py

# Nothing of it is fetched from elsewhere, neither here nor by who reads it. The variable spares us a word about mkdocs 2.
site: $(READY) ## build/site: all documents as a web site, with a reference made from the code
	$(PY) -m pip install --quiet -c constraints.txt -e '.[docs]'
	NO_MKDOCS_2_WARNING=1 $(PY) -m mkdocs build --strict --quiet
	@echo "build/site/index.html is the first page; to search in it: $(PY) -m http.server --bind 127.0.0.1 --directory build/site"

lint: $(READY) ## ruff and mypy
	$(PY) -m ruff check .
	$(PY) -m mypy $(SOURCES)

lock: $(READY) ## write locked.txt and locked-image.txt anew: all that we install, by hash
	.ci/lock

# Known holes come from a database on the network; the bill of materials does not.
audit: $(READY) ## build/sbom.json (CycloneDX), and known holes in what locked.txt names
	@mkdir -p build
	@rm -f build/audit.json
	$(PYTHON) -m venv .venv/audit
	@.venv/audit/bin/pip install --quiet pip-audit cyclonedx-bom 2>build/audit.log || { echo "holdfast: pip cannot install pip-audit and cyclonedx-bom here; build/audit.log says why." >&2; exit 1; }
	.venv/audit/bin/cyclonedx-py requirements locked.txt --pyproject pyproject.toml -o build/sbom.json
	@.venv/audit/bin/pip-audit --strict --no-deps --disable-pip --require-hashes -r locked.txt -f json -o build/audit.json 2>build/audit.log; code=$$?; \
	test -s build/audit.json || { echo "holdfast: nobody has looked for known holes: pip-audit did not finish, and it needs a database on the network; build/audit.log says why, and build/sbom.json is there." >&2; exit 1; }; \
	cat build/audit.log; echo "build/audit.json has what is known of each package"; exit $$code

# Savers and launchers of others, to be measured beside ours. Without what they depend on, as that might be another torch,
# and beside the environment, not in it; one that cannot be had is named in the results.
$(PEERS) $(OLDER): .venv/%/.ready: benchmarks/%.txt | $(READY)
	grep -v '^#' $< | xargs -n 1 $(PY) -m pip install --quiet --no-deps --upgrade --target $(@D) || true
	@touch $@

# All of one file at once: some of these packages share a folder.
$(ALIVE): build/%/.ready: benchmarks/%.txt | $(READY)
	rm -rf $(@D)
	$(PY) -m pip install --quiet --no-deps --target $(@D) -r $< || true
	@mkdir -p $(@D) && touch $@

bench-elastic: $(ALIVE)
bench-ckpt: $(PEERS)
bench-recovery: $(PEERS) $(OLDER)

bench: $(addprefix bench-,$(BENCHES)) ## all benchmarks but the slow ones

bench-%: $(READY) always ## one benchmark: benchmarks/%.py; ARGS goes to it
	$(PY) benchmarks/$*.py $(ARGS)

clean: ## remove what the tools have left; .venv and the records of runs stay
	rm -rf build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis *.egg-info
	find $(SOURCES) -name __pycache__ -type d -prune -exec rm -rf {} +
