#!/usr/bin/env bash
# bazel test //... without a network, as with Debian's bazel-bootstrap 4.2.3.
#
#   tools/bazel_test.sh PYTHON FFI_INCLUDE_DIR
#
# PYTHON has jax, te_jax's other requirements, pytest and pybind11. Bazel's own rules, which a Bazel with a network
# downloads, are given as local folders: rules_cc re-exports the native rules, rules_java is Debian's package
# bazel-rules-java, and of remote_coverage_tools only two names are needed.
set -euo pipefail
cd "$(dirname "$0")/.."
python=$1
ffi_include=$(realpath "$2")
repositories=$PWD/build/bazel
rules_java=/usr/share/bazel/rules/java
[ -d "$rules_java" ] || { echo "bazel_test.sh: no $rules_java (apt-get install bazel-rules-java)" >&2; exit 1; }

# new_repository NAME: an empty repository folder, with the BUILD file from standard input.
new_repository() {
  mkdir -p "$repositories/$1"
  echo "workspace(name = \"$1\")" > "$repositories/$1/WORKSPACE"
  cat > "$repositories/$1/BUILD"
}

new_repository headers << 'BUILD'
package(default_visibility = ["//visibility:public"])
cc_library(name = "xla_ffi", hdrs = glob(["ffi/**/*.h"]), includes = ["ffi"])
cc_library(name = "pybind11", hdrs = glob(["pybind11/**/*.h", "python/**/*.h"]), includes = ["pybind11", "python"])
BUILD
copy() { rm -rf "$2"; cp -rL "$1" "$2"; }
copy "$ffi_include" "$repositories/headers/ffi"
copy "$("$python" -c 'import pybind11; print(pybind11.get_include())')" "$repositories/headers/pybind11"
copy "$("$python" -c 'import sysconfig; print(sysconfig.get_paths()["include"])')" "$repositories/headers/python"

new_repository rules_cc < /dev/null
mkdir -p "$repositories/rules_cc/cc"
touch "$repositories/rules_cc/cc/BUILD"
cat > "$repositories/rules_cc/cc/defs.bzl" << 'DEFS'
cc_binary = native.cc_binary
cc_import = native.cc_import
cc_library = native.cc_library
cc_test = native.cc_test
cc_toolchain = native.cc_toolchain
cc_toolchain_suite = native.cc_toolchain_suite
DEFS

mkdir -p "$repositories/remote_coverage_tools"
echo 'workspace(name = "remote_coverage_tools")' > "$repositories/remote_coverage_tools/WORKSPACE"
cat > "$repositories/remote_coverage_tools/BUILD" << 'BUILD'
package(default_visibility = ["//visibility:public"])
filegroup(name = "coverage_report_generator")
filegroup(name = "lcov_merger")
BUILD

exec bazel test //... \
  --override_repository=rules_cc="$repositories/rules_cc" \
  --override_repository=rules_java="$rules_java" \
  --override_repository=remote_coverage_tools="$repositories/remote_coverage_tools" \
  --test_env=PATH="$(dirname "$(realpath -s "$python")"):$PATH" --test_env=JAX_PLATFORMS=cpu \
  --test_output=errors --jobs=2 --experimental_convenience_symlinks=ignore
