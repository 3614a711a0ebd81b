# make train   set everything up, then train a byte-level transformer in FP8
# make test    set everything up, then run the tests
#
# Needs Python >= 3.11, make and a C++ compiler; cmake and ninja come through pip. Nothing outside this folder is changed.
#
#   PYTHON=python3.12     the interpreter of the environment (default python3)
#   VENV=.venv            where the environment is
#   PACKAGES='jax==0.11.2'  further requirements, for example a jax version
#   JOBS=4               processes that `make test` runs (default 2; 1 where a GPU is seen, which they would share)
#   ARGS='--recipe current --steps 50'   passed on to train_lm.py or pytest

PYTHON ?= python3
VENV ?= .venv
PACKAGES ?=
ARGS ?=
JOBS ?= $(if $(wildcard /dev/nvidiactl),1,2)

BIN := $(VENV)/bin
STAMP := $(VENV)/installed
comma := ,
# By file: what a file compiles or trains is used by its other tests. A process that dies ends the run.
PARALLEL := $(if $(filter 1,$(JOBS)),,-n $(JOBS) --dist loadfile --max-worker-restart 0)
# Where a GPU is seen, jax with CUDA. The CUDA module is then built too, if there is nvcc (CMakeLists.txt).
EXTRAS := test,examples$(if $(wildcard /dev/nvidiactl),$(comma)cuda)
NATIVE := $(wildcard CMakeLists.txt cmake/*.cmake csrc/*/*.cc csrc/*/*.h csrc/*/*/*.cc csrc/*/*/*.h csrc/*/*.cu csrc/*/*.cuh)

.PHONY: setup train test bench two-gpus lint format cpp-test cpp-sanitize native cuda bazel clean
.DELETE_ON_ERROR:

setup: $(STAMP)

train: $(STAMP)
	$(BIN)/python examples/train_lm.py --compare $(ARGS)

test: $(STAMP)
	$(BIN)/python -m pytest $(PARALLEL) $(ARGS)

# Needs a GPU with compute capability 9.0 and the CUDA module (`make cuda`). What is measured: docs/performance.md.
bench: $(STAMP)
	$(BIN)/python benchmarks/single_gpu.py --out benchmarks/results/single_gpu.jsonl $(ARGS)

# Needs two GPUs of one host and the CUDA module. docs/collective.md says what is measured; ARGS goes to the benchmark.
two-gpus: $(STAMP)
	$(BIN)/python -m te_jax.doctor
	-$(BIN)/python -m pytest -m multigpu -q
	$(BIN)/python benchmarks/collective.py --out benchmarks/results/collective_jax.jsonl $(ARGS)

$(VENV)/created:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "te_jax needs Python 3.11 or newer; $(PYTHON) is $$($(PYTHON) --version). Set PYTHON=..." >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	touch $@

# An editable install, rebuilt when the C++ changes. The extension modules land in te_jax/_native.
$(STAMP): $(VENV)/created pyproject.toml $(NATIVE)
	$(BIN)/python -m pip install --quiet --editable '.[$(EXTRAS)]' $(PACKAGES)
	touch $@

$(VENV)/lint-installed: $(STAMP)
	$(BIN)/python -m pip install --quiet --group lint
	touch $@

lint: $(VENV)/lint-installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyrefly check --python-interpreter-path $(BIN)/python

format: $(VENV)/lint-installed
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# The rest builds straight with CMake, against the FFI headers of the oldest supported jaxlib.
BUILD_TOOLS := $(VENV)/build-tools-installed
FFI_HEADERS := $(VENV)/oldest-jaxlib
CMAKE = PATH="$(abspath $(BIN)):$$PATH" cmake -G Ninja -DPython_EXECUTABLE=$(abspath $(BIN))/python \
  -DTE_JAX_FFI_INCLUDE_DIR=$(abspath $(FFI_HEADERS))/jaxlib/include
CMAKE_BUILD = PATH="$(abspath $(BIN)):$$PATH" cmake --build

$(BUILD_TOOLS): $(VENV)/created pyproject.toml
	$(BIN)/python -m pip install --quiet 'cmake>=3.24' ninja 'pybind11>=2.13'
	$(BIN)/python -m pip install --quiet --no-deps --target $(FFI_HEADERS) --upgrade jaxlib==0.10.2
	touch $@

# The CPU module alone, in place: the quick way while working on the C++.
native: $(BUILD_TOOLS)
	$(CMAKE) -S . -B build/native-cpu -DTE_JAX_CUDA=OFF
	$(CMAKE_BUILD) build/native-cpu

# The CUDA module too, in place; needs nvcc, not a GPU.
cuda: $(BUILD_TOOLS)
	$(CMAKE) -S . -B build/native-cuda -DTE_JAX_CUDA=ON
	$(CMAKE_BUILD) build/native-cuda

cpp-test: $(BUILD_TOOLS)
	$(CMAKE) -S . -B build/cpp-test -DTE_JAX_CUDA=OFF -DTE_JAX_PYTHON=OFF -DTE_JAX_TESTS=ON
	$(CMAKE_BUILD) build/cpp-test
	$(BIN)/ctest --test-dir build/cpp-test --output-on-failure

cpp-sanitize: $(BUILD_TOOLS)
	$(CMAKE) -S . -B build/cpp-sanitize -DTE_JAX_CUDA=OFF -DTE_JAX_PYTHON=OFF -DTE_JAX_TESTS=ON \
	  -DTE_JAX_SANITIZE=address,undefined
	$(CMAKE_BUILD) build/cpp-sanitize
	$(BIN)/ctest --test-dir build/cpp-sanitize --output-on-failure
	$(CMAKE) -S . -B build/cpp-thread -DTE_JAX_CUDA=OFF -DTE_JAX_PYTHON=OFF -DTE_JAX_TESTS=ON -DTE_JAX_SANITIZE=thread
	$(CMAKE_BUILD) build/cpp-thread --target comm_schedule_test comm_channel_test comm_meeting_test comm_operands_test
	setarch -R $(BIN)/ctest --test-dir build/cpp-thread --output-on-failure -R '^comm_'  # TSan wants fixed addresses

bazel: $(STAMP) $(BUILD_TOOLS)
	tools/bazel_test.sh $(BIN)/python $(FFI_HEADERS)/jaxlib/include

clean:
	rm -rf build .venv te_jax/_native/*.so .pytest_cache .ruff_cache
