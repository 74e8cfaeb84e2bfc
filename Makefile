# How a stranger tries, tests and checks this project: needs only make, and Python 3.10 or newer with pip.

PYTHON ?= python3
# A release of torch, or `nightly`: if not that of the example's baselines, it has environments of its own.
PINNED := $(shell sed -n 's/.*"torch==\([^"]*\)".*/\1/p' example_project/pyproject.toml)
TORCH ?= $(PINNED)
OTHER := $(if $(filter-out $(PINNED),$(TORCH)),-$(TORCH))
# torch 2.6 lacks what later releases of torchao are made with.
OLDER_TORCHAO := $(if $(filter 2.6.%,$(TORCH)),'torchao<0.13')
NIGHTLY := $(if $(filter nightly,$(TORCH)),https://download.pytorch.org/whl/nightly)
VENV ?= .venv$(OTHER)
BIN := $(VENV)/bin
TEST_READY := $(VENV)/.test-installed
DEV_READY := $(VENV)/.dev-installed
EMULATED_VENV ?= .venv-emulated$(OTHER)
EMULATED_READY := $(EMULATED_VENV)/.installed
EXAMPLE_VENV ?= .venv-example$(OTHER)
EXAMPLE_READY := $(EXAMPLE_VENV)/.installed
EXAMPLE_EMULATED_VENV ?= .venv-example-emulated$(OTHER)
EXAMPLE_EMULATED_READY := $(EXAMPLE_EMULATED_VENV)/.installed
DOCS_VENV ?= .venv-docs
DOCS_READY := $(DOCS_VENV)/.installed
# Of these releases pip need not try others. torch and what belongs to its release are chosen here.
PINS := --constraint constraints.txt
# The CUDA build of torch needs none of NVIDIA's libraries where these are stood in for. Three signs: no other build will do.
EMULATED_TORCH := $(if $(NIGHTLY),--pre torch --index-url $(NIGHTLY)/cu132,torch===$(TORCH))
# pip takes what belongs to an extra for not required: the line of docs/guide/no-gpu.md. Triton is for torch.compile.
WITHOUT_NVIDIA := sed -i -E 's/^(Requires-Dist: (cuda|nvidia)-[^;]*).*/\1; extra == "nvidia"/'
WITHOUT_TRITON := sed -i -E 's/^(Requires-Dist: triton[^;]*).*/\1; extra == "triton"/'
EMULATED_NEEDS := numpy 'transformers[serving]>=5' 'peft>=0.17' 'pytest-xdist>=3.8' 'timm>=1.0' 'diffusers>=0.31' torchvision
# Workers have a core each: more threads of one would wait for the others'. One that has no tests left takes of another's.
SUITE = -m pytest -n auto --dist worksteal

.DEFAULT_GOAL := help
.PHONY: help example example-cpu example-emulated test explore emulated gpu gpu-tests truth cuda size constraints lint docs \
	reference release-check replays browser compiler screenshots clean

help:
	@echo "make example   gate the example project against its committed baselines: on an emulated GPU where there can be one, else on the CPU"
	@echo "               (example-emulated and example-cpu choose); installs this plugin, torch and pytest. The gate takes 17 seconds on"
	@echo "               the emulated GPU, and about two minutes on the CPU"
	@echo "make test      run the suite; installs what its tests use, too: transformers, Lightning, S3, a driver of browsers, ... (2 GB)"
	@echo "make explore   run the suite for more models, with random examples, 25 times as many, and in a random order"
	@echo "make emulated  run the tests on an emulated GPU, and gate the example project there (Linux on x86-64, a C compiler)"
	@echo "make gpu       run the tests that need a GPU, then the table of truth, in the environment that is active (torch with CUDA,"
	@echo "               pytest, transformers); make gpu-tests and make truth run one of them, TRUTH='--only gpt2' adds to the table's"
	@echo "make replays   compare releases of packages in which one needs more memory, on the CPU and an emulated GPU, by gpumem ab:"
	@echo "               needs the package index, and 11 GB for their environments; ARGS=llama_mask runs one"
	@echo "make lint      check format, style, types, which house and room imports which, prose and names (.ci/voice.py), and workflows"
	@echo "make reference make docs/reference/ from the code: docstrings, help texts and tables; lint fails when a page is stale"
	@echo "make size      print lines by room, files of a training step, tests and seconds (THAN=folder: and the difference to another"
	@echo "               checkout), then how prose and names read, which lint checks"
	@echo "make compiler  install a C compiler, which an emulated GPU needs, where there is none (Debian, as root)"
	@echo "make docs      make the site of docs/ in build/site; a link that leads nowhere fails it"
	@echo "make release-check  build sdist and wheel into dist/, check them, and gate the example with the wheel, in new environments"
	@echo "make browser   install Chromium, which the tests of the HTML report need, where it is missing (Debian, as root)"
	@echo "make screenshots  take the pictures of the HTML report in the docs anew, and that of a failure (needs Chromium)"
	@echo "make constraints  take the newest releases into constraints.txt, which pins what development installs (needs uv)"
	@echo "make clean     remove the virtual environments, caches and builds"
	@echo "PYTHON=python3.12 chooses the Python, VENV=folder where the virtual environment lies, ARGS='-k gpt' adds to pytest,"
	@echo "TORCH=2.15.0 the release of torch, or nightly: test, emulated and example with another one than $(PINNED), in an environment of its own,"
	@echo "ARGS='-m thorough' runs what test and emulated leave out: it shows in another way what another test shows"

# Where a GPU can be emulated, on it: its torch is loaded without NVIDIA's libraries, 0.5 GB in place of 3.
example:
	@if [ "$$(uname -sm)" = "Linux x86_64" ] && command -v cc >/dev/null && ! [ -e /dev/nvidiactl ]; then $(MAKE) example-emulated; \
	else echo "on the CPU: to emulate a GPU needs Linux on x86-64, a C compiler (make compiler), and no GPU in this machine"; \
		$(MAKE) example-cpu; fi

example-cpu: $(EXAMPLE_READY)
	cd example_project && ../$(EXAMPLE_VENV)/bin/python -m pytest --gpumem-baseline --gpumem-device=cpu $(ARGS)

# The emulated GPU's baselines are those of this release of torch.
example-emulated: $(EXAMPLE_EMULATED_READY)
	cd example_project && ../$(EXAMPLE_EMULATED_VENV)/bin/python -m pytest --gpumem-baseline --gpumem-device=emulated:h100 $(ARGS)

# The suite gates a copy of the example project, too: tests/test_example_project.py. On every core; ARGS='-n 0' runs it in this
# process.
# The same order and the same examples of property tests each time: tests/chance.py.
test: $(TEST_READY)
	OMP_NUM_THREADS=1 $(BIN)/python $(SUITE) --junitxml=$(VENV)/test.xml -m "not thorough" $(ARGS)

# What it finds becomes an @example. The header shows the seed; ARGS='-m hypothesis' runs property tests only.
explore: $(TEST_READY)
	OMP_NUM_THREADS=1 $(BIN)/python $(SUITE) --hypothesis-profile=explore --randomly-seed=$$(date +%s) $(ARGS)

# torch can only be imported on an emulated GPU there.
emulated: $(EMULATED_READY)
	OMP_NUM_THREADS=1 $(EMULATED_VENV)/bin/gpumem emulate --quiet h100 -- \
		$(EMULATED_VENV)/bin/python $(SUITE) tests/emulated tests/gpu -m "not thorough" $(ARGS)
	$(MAKE) example-emulated EXAMPLE_EMULATED_VENV=$(EMULATED_VENV) ARGS=

# Named ones: make replays ARGS='llama_mask workspaces'.
replays: $(TEST_READY) $(EMULATED_READY)
	$(BIN)/python benchmarks/replay.py --device cpu $(ARGS)
	$(EMULATED_VENV)/bin/python benchmarks/replay.py --device emulated $(ARGS)

# They install nothing. The table is made of what runs, also when a test has failed.
gpu: cuda
	$(MAKE) gpu-tests; tests=$$?; $(MAKE) truth && exit $$tests

# A plugin that is installed must not be named again, and one that is not has to be.
gpu-tests truth: export PYTHONPATH := $(CURDIR)$(if $(PYTHONPATH),:$(PYTHONPATH))
gpu-tests: cuda
	plugin=$$($(PYTHON) -c "from importlib.metadata import entry_points as e; \
		print('' if any(p.name == 'gpumem' for p in e(group='pytest11')) else '-p pytest_gpumem.plugin')") && \
	$(PYTHON) -m pytest $$plugin tests/gpu $(ARGS)
	@echo "what the tests measured is in benchmarks/results/<device>/tests.json"

truth: cuda
	$(PYTHON) benchmarks/truth.py --device cuda --out benchmarks/results $(TRUTH)

cuda:
	@$(PYTHON) -c "import sys, torch; sys.exit(None if torch.cuda.is_available() else 'this needs a GPU: torch finds no CUDA device')"

# Of the tests what the latest `make test` left. THAN=folder adds the difference to another checkout.
size:
	$(PYTHON) .ci/size.py $(if $(THAN),--than $(THAN))
	$(PYTHON) .ci/voice.py

# Needs uv. The pins of one release of torch would be wrong for another one.
constraints:
	{ sed -n '/^#/p' constraints.txt && printf '%s\n' $(EMULATED_NEEDS) | uv pip compile --quiet --upgrade --universal --python-version 3.10 \
		--extra test --no-header --no-annotate --no-emit-package torch pyproject.toml - | \
		grep -vE '^(cuda-|nvidia-[^m]|triton|torchao|torchvision|mpmath|networkx|sympy|setuptools)'; } >constraints.new
	mv constraints.new constraints.txt

# A benchmark that is run once a year has to fit the package of today. Its packages may be missing here.
OF_BENCHMARKS := --config-file= --python-version 3.11 --check-untyped-defs --ignore-missing-imports --follow-imports=silent
lint: $(DEV_READY)
	$(BIN)/ruff format --check
	$(BIN)/ruff check
	$(BIN)/mypy
	MYPYPATH=benchmarks $(BIN)/mypy $(OF_BENCHMARKS) benchmarks/*.py
	$(BIN)/lint-imports
	$(BIN)/python .ci/reference --check
	$(BIN)/python .ci/voice.py --check
	$(BIN)/python .ci/docs_workflows.py build/workflows
	$(BIN)/zizmor --offline --quiet --persona=pedantic --min-severity=medium --config=.ci/zizmor.yml \
		.github action.yml comment/action.yml pytest_gpumem/tools/init/workflows/*.yml build/workflows/*.yml
	$(BIN)/check-jsonschema --quiet --builtin-schema vendor.github-workflows \
		.github/workflows/*.yml pytest_gpumem/tools/init/workflows/*.yml build/workflows/*.yml
	$(BIN)/check-jsonschema --quiet --builtin-schema vendor.github-actions action.yml comment/action.yml
	$(BIN)/check-jsonschema --quiet --builtin-schema vendor.dependabot .github/dependabot.yml

reference: $(TEST_READY)
	$(BIN)/python .ci/reference

# The tests look for `chromium`, and are skipped without it. apt-get waits for another one to end.
browser:
	$(call install_command,chromium,chromium,the tests of the HTML report need it)

compiler:
	$(call install_command,cc,gcc libc6-dev,an emulated GPU needs it)

# $(1) is the command, $(2) the packages that have it, $(3) what it is for.
define install_command
	@if command -v $(1) >/dev/null; then echo "there is a $(1): $$(command -v $(1))"; \
	elif ! command -v apt-get >/dev/null; then \
		echo "$(1) is missing, and there is no apt-get to install it: install it with this system's package manager" >&2; exit 1; \
	elif [ "$$(id -u)" != 0 ]; then \
		echo "$(1) is missing: run as root, 'apt-get install --no-install-recommends $(2)'" >&2; exit 1; \
	else \
		export DEBIAN_FRONTEND=noninteractive; \
		apt-get -o Acquire::Retries=3 update -q && \
		apt-get -o Acquire::Retries=3 -o DPkg::Lock::Timeout=120 install -q -y --no-install-recommends $(2) || { \
			echo "$(1) could not be installed (see above); $(3)" >&2; exit 1; }; \
	fi
endef

# Sphinx leaves pages alone that are as before; the front page is as new as this build, which the site's tests ask for.
docs: $(DOCS_READY)
	$(DOCS_VENV)/bin/python -m sphinx --nitpicky --fail-on-warning --keep-going --quiet -b html docs build/site
	touch build/site/index.html

$(DOCS_READY): docs/requirements.txt
	$(call new_environment,$(DOCS_VENV))
	$(DOCS_VENV)/bin/python -m pip install --requirement docs/requirements.txt
	touch $@

# One cell of the workflow's matrix: of Python by PYTHON, of torch by TORCH.
release-check:
	PYTHON=$(PYTHON) TORCH=$(TORCH) .ci/release-check $(ARGS)

screenshots: $(TEST_READY)
	SCREENSHOTS=$(CURDIR)/docs/images $(BIN)/python -m pytest -p no:randomly tests/browser/test_screenshots.py tests/test_terminal_picture.py

clean:
	rm -rf .venv .venv-* $(VENV) $(EMULATED_VENV) $(EXAMPLE_VENV) $(EXAMPLE_EMULATED_VENV) build dist .mypy_cache .ruff_cache .hypothesis
	find . -type d \( -name __pycache__ -o -name .pytest_cache \) -prune -exec rm -rf {} +

# Environments are made anew whenever what they are made of changes. Where Python comes without ensurepip, as on Debian, its own pip
# fills them; a pip older than 22.3 cannot, or cannot install a project in place, and is brought up to date.
define new_environment
$(PYTHON) -m venv --clear $(1) || { \
	$(PYTHON) -m venv --clear --without-pip $(1) && $(PYTHON) -m pip --python $(1)/bin/python install pip; }
$(1)/bin/python -c "import pip, sys; sys.exit(tuple(map(int, pip.__version__.split('.')[:2])) < (22, 3))" || \
	$(1)/bin/python -m pip install --upgrade pip
endef

# The CUDA build of torch in an environment, without NVIDIA's libraries.
define emulated_torch
$(1)/bin/python -m pip install --no-deps $(EMULATED_TORCH)
$(WITHOUT_NVIDIA) $(1)/lib/python*/site-packages/torch-*.dist-info/METADATA
endef

$(TEST_READY): pyproject.toml example_project/pyproject.toml constraints.txt
	$(call new_environment,$(VENV))
	$(if $(NIGHTLY),$(BIN)/python -m pip install --pre torch --index-url $(NIGHTLY)/cpu)
	@echo "installing what the tests use, torch $(TORCH) among it, into $(VENV)/"
	$(BIN)/python -m pip install $(PINS) $(if $(NIGHTLY),,torch==$(TORCH)) $(OLDER_TORCHAO) --editable '.[test]'
	touch $@

# What a user installs.
$(EXAMPLE_READY): pyproject.toml example_project/pyproject.toml constraints.txt
	$(call new_environment,$(EXAMPLE_VENV))
	$(EXAMPLE_VENV)/bin/python -m pip install $(PINS) $(if $(NIGHTLY),--pre torch --index-url $(NIGHTLY)/cpu,torch==$(TORCH))
	$(EXAMPLE_VENV)/bin/python -m pip install $(PINS) numpy --editable .
	touch $@

$(EXAMPLE_EMULATED_READY): pyproject.toml example_project/pyproject.toml constraints.txt
	$(call new_environment,$(EXAMPLE_EMULATED_VENV))
	$(call emulated_torch,$(EXAMPLE_EMULATED_VENV))
	$(WITHOUT_TRITON) $(EXAMPLE_EMULATED_VENV)/lib/python*/site-packages/torch-*.dist-info/METADATA
	$(EXAMPLE_EMULATED_VENV)/bin/python -m pip install $(PINS) numpy --editable .
	touch $@

# torch requires Triton, in its release, for torch.compile. timm requires torchvision, in one for this torch, which is named so that
# none for another takes its place.
$(EMULATED_READY): pyproject.toml example_project/pyproject.toml constraints.txt
	$(call new_environment,$(EMULATED_VENV))
	$(call emulated_torch,$(EMULATED_VENV))
	$(EMULATED_VENV)/bin/python -m pip install $(PINS) $(if $(NIGHTLY),,$(EMULATED_TORCH)) $(EMULATED_NEEDS) $(OLDER_TORCHAO) --editable '.[torchao]'
	touch $@

$(DEV_READY): $(TEST_READY)
	$(BIN)/python -m pip install $(PINS) --editable '.[dev]'
	touch $@
