# Every target sets up what it needs: .venv is made once, and again when pyproject.toml changes.
# All it takes is make and a Python of at least 3.11; `make PYTHON=/path/to/python3` names one.

VENV := .venv
STAMP := $(VENV)/.stamp
RUN := $(VENV)/bin/python -m
# The system's own comes first: distributions build it with profile-guided optimisation, which those that people build
# for themselves often lack, and without it an append takes a quarter longer (ADR 0033).
PYTHONS := $(if $(PYTHON),$(PYTHON),/usr/bin/python3 python3.13 python3.12 python3.11 python3)

# Further arguments for the program behind test, demo, simulate and bench: make test ARGS="-k cut -x"
ARGS ?=

# Tests and benchmarks start hundreds of Python processes, and each would compile all sources anew.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
FAULT_CAMPAIGNS := tests/simulation tests/integration/test_cluster_faults.py tests/integration/test_sn_kill.py \
  tests/integration/test_publishing_faults.py tests/integration/service/test_rest_contract.py \
  tests/spark/test_sink_kill.py tests/spark/test_paused_drivers.py tests/spark/test_agents_on_clusters.py

.PHONY: help demo test soak check simulate bench format clean FORCE

help: ## Print this list
	@sed -n 's/^\([a-z]*\):.*## \(.*\)$$/\1 \2/p' $(firstword $(MAKEFILE_LIST)) | \
	  while read -r target text; do printf '  make %-10s %s\n' "$$target" "$$text"; done

demo: $(STAMP) ## Show the log at work in this terminal
	@$(RUN) cutwater.testing.demo $(ARGS)

test: $(STAMP) ## Run all tests
	@$(RUN) pytest -n auto --maxprocesses 8 --dist loadgroup $(ARGS)

soak: $(STAMP) ## Campaigns of faults and random programs at length; HOURS=n: seeds of the simulator for so long
	@$(if $(HOURS),$(RUN) cutwater.testing.soak --hours $(HOURS) $(ARGS),CUTWATER_SOAK=1 $(RUN) pytest -n 2 \
	  --dist loadgroup --hypothesis-profile=thorough --timeout 7200 $(FAULT_CAMPAIGNS) tests/property $(ARGS))

check: $(STAMP) ## Formatting, lint, types, and the direction of imports
	@$(RUN) ruff format --quiet --check . || { echo 'Not formatted as above; make format does it.' >&2; exit 1; }
	@$(RUN) ruff check --quiet .
	@$(RUN) mypy --strict
	@$(RUN) pytest --quiet tests/unit/test_import_direction.py tests/unit/test_class_names.py

simulate: $(STAMP) ## Run the simulator: SEED=n replays one run, SEEDS=n FIRST=n JOBS=n PROFILE=name run many
	@$(RUN) cutwater.testing.simulate $(if $(SEED),--seed $(SEED)) $(if $(SEEDS),--seeds $(SEEDS)) \
	  $(if $(FIRST),--first $(FIRST)) $(if $(JOBS),--jobs $(JOBS)) $(if $(PROFILE),--profile $(PROFILE)) $(ARGS)

bench: $(STAMP) ## Measure, next to references, and write docs/benchmarks.md
	@$(RUN) benchmarks $(ARGS)

format: $(STAMP) ## Format the code and repair what lint can repair
	@$(RUN) ruff check --quiet --fix-only .
	@$(RUN) ruff format --quiet .

clean: ## Remove .venv and all caches
	@rm -rf $(VENV) build dist .hypothesis .mypy_cache .pytest_cache .ruff_cache
	@find . -name __pycache__ -type d -prune -exec rm -rf {} +

# The stamp says where .venv was made and what PYTHON was then. An environment that was copied or moved here would
# run the code of the other place, and one made with another interpreter is not the one asked for: both are made anew.
ifneq ($(wildcard $(STAMP)),)
  ifneq ($(shell sed -n 1p $(STAMP)),$(CURDIR))
    $(STAMP): FORCE
    ANEW := yes
  else ifneq ($(PYTHON),)
    ifneq ($(shell sed -n 2p $(STAMP)),$(PYTHON))
      $(STAMP): FORCE
      ANEW := yes
    endif
  endif
endif

# The stamp goes first and comes back last, so an interrupted or failed set-up starts over with an empty environment.
$(STAMP): pyproject.toml
	@if [ -f $@ ] && [ -z "$(ANEW)" ]; then reuse=yes; else reuse=; fi; rm -f $@; \
	if [ -z "$$reuse" ]; then \
	  python=; bare=; \
	  for candidate in $(PYTHONS); do \
	    "$$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1 || continue; \
	    if "$$candidate" -c 'import ensurepip, venv' >/dev/null 2>&1; then python=$$candidate; break; fi; \
	    bare=$${bare:-$$candidate}; \
	  done; \
	  if [ -z "$$python" ] && [ -n "$$bare" ]; then \
	    version=$$("$$bare" -c 'import sys; print("%d.%d" % sys.version_info[:2])'); \
	    echo "$$bare is Python $$version, but it lacks the modules venv and ensurepip." >&2; \
	    echo "On Debian and Ubuntu: apt install python$$version-venv" >&2; \
	    echo "Or name another interpreter: make PYTHON=/path/to/python3" >&2; \
	    exit 1; \
	  elif [ -z "$$python" ]; then \
	    echo "Python 3.11 or newer is needed, and none of these is one: $(PYTHONS)" >&2; \
	    echo "Install one, or name it: make PYTHON=/path/to/python3" >&2; \
	    exit 1; \
	  fi; \
	  echo "Setting up $(VENV) with $$("$$python" --version), which takes a few minutes."; \
	  "$$python" -m venv --clear $(VENV) || exit 1; \
	else \
	  echo "Bringing $(VENV) up to date with pyproject.toml."; \
	fi; \
	$(RUN) pip install --quiet --disable-pip-version-check --editable '.[dev]' >$(VENV)/setup.log 2>&1 \
	  || { cat $(VENV)/setup.log >&2; exit 1; }; \
	printf '%s\n' "$(CURDIR)" "$(PYTHON)" >$@
