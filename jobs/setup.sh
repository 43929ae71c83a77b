#!/bin/sh
# Installs what building, running and testing k3decode need, on Debian and Ubuntu. Quick when all is there.
#
#   jobs/setup.sh
#
# Elsewhere it names the packages, and goes on when the compiler, MPI and HDF5 are found.
# Environment: K3_SETUP_TESTS=0 leaves out what only the tests use, and the libraries of report and text.
set -eu

# without these nothing is built
required='build-essential autoconf automake pkg-config openmpi-bin libopenmpi-dev libhdf5-dev zlib1g-dev'
# hdf5-tools looks into run files, libjson-c-dev serves import
optional='hdf5-tools libjson-c-dev'
# python3-h5py and python3-matplotlib serve the command report too
tests='libcmocka-dev python3-numpy python3-h5py python3-pytest python3-matplotlib python3-jsonschema python3-pip clang valgrind'
tests="$tests shellcheck slurmctld slurmd slurm-client munge iproute2"
[ "${K3_SETUP_TESTS:-1}" = 0 ] || optional="$optional $tests"

note() { echo "setup: $*" >&2; }

# Packages out of the arguments that are not installed.
absent() {
  for package; do
    [ "$(dpkg-query -W -f '${db:Status-Status}' "$package" 2>/dev/null || :)" = installed ] || printf ' %s' "$package"
  done
}

# What Debian has not: the tokenizer library of the command text, which says how to get it where it is missing, and the public
# package that tests compare GGUF blocks with, skipped without it.
install_from_pypi() {
  [ "${K3_SETUP_TESTS:-1}" != 0 ] && [ "$(id -u)" -eq 0 ] || return 0
  python=/usr/bin/python3 # the one that the packages above serve
  "$python" -m pip --version >/dev/null 2>&1 || return 0
  pip="timeout 120 $python -m pip install -q --retries 1 --timeout 20"
  for package in tiktoken gguf==0.19.0; do
    "$python" -c "import ${package%%=*}" 2>/dev/null && continue
    # --break-system-packages: unknown to the pip of older systems, wanted by that of newer ones
    # shellcheck disable=SC2086 # a command and words
    $pip --root-user-action=ignore --break-system-packages "$package" >&2 || $pip "$package" >&2 ||
      note "pip could not install $package; going on without"
  done
}

# What the required packages bring, however it came here.
have_requirements() {
  for tool in cc make autoconf automake pkg-config mpicc mpirun; do
    command -v "$tool" >/dev/null 2>&1 || {
      note "not found: $tool"
      return 1
    }
  done
  pkg-config --exists hdf5-serial || pkg-config --exists hdf5 || command -v h5cc >/dev/null 2>&1 || {
    note "not found: HDF5 (pkg-config hdf5-serial, pkg-config hdf5, h5cc)"
    return 1
  }
}

# Ends the script by what is there already; $1 says why nothing could be installed.
go_on_or_fail() {
  if have_requirements; then
    note "$1; compiler, MPI and HDF5 are found, so the build can go on. Missing:$2"
    exit 0
  fi
  note "$1. Install with your system's means what these Debian packages bring:$2"
  exit 1
}

if ! command -v apt-get >/dev/null 2>&1 || ! command -v dpkg-query >/dev/null 2>&1; then
  go_on_or_fail 'this system has no apt' " $required $optional"
fi

# shellcheck disable=SC2086 # lists of words
missing_required=$(absent $required)
# shellcheck disable=SC2086
missing_optional=$(absent $optional)
[ -n "$missing_required$missing_optional" ] || {
  install_from_pypi
  exit 0
}

if [ "$(id -u)" -eq 0 ]; then
  as_root='env'
elif command -v sudo >/dev/null 2>&1 && { [ -t 0 ] || sudo -n true 2>/dev/null; }; then
  as_root='sudo'
else
  go_on_or_fail 'not root, and no sudo to ask' "$missing_required$missing_optional"
fi

# An unreachable mirror must not hold a build for minutes that could go on without.
apt="timeout 900 apt-get -q -y -o Acquire::Retries=1 -o Acquire::http::Timeout=20 -o Acquire::https::Timeout=20 -o DPkg::Lock::Timeout=120"
note "installing$missing_required$missing_optional"
# shellcheck disable=SC2086 # a command and lists of words
{
  $as_root $apt update >&2 || note 'apt-get update failed; trying with the lists that are here'
  if ! $as_root env DEBIAN_FRONTEND=noninteractive $apt install --no-install-recommends $missing_required $missing_optional >&2; then
    # one package that the system lacks must not keep the others away
    for package in $missing_required $missing_optional; do
      $as_root env DEBIAN_FRONTEND=noninteractive $apt install --no-install-recommends "$package" >&2 || note "could not install $package"
    done
  fi
  missing_required=$(absent $required)
  missing_optional=$(absent $optional)
}
[ -z "$missing_required" ] || go_on_or_fail 'apt-get could not install all' "$missing_required$missing_optional"
[ -z "$missing_optional" ] || note "going on without$missing_optional"
install_from_pypi
