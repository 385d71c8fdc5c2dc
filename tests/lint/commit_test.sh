#!/bin/bash
# The build's step that asks for the commit, in a repository of its own: it says what is true now, and touches nothing when
# nothing is new. commit_test.sh WORK CMAKE: a folder to write in, the cmake program.
set -euo pipefail
command -v git >/dev/null || { echo "SKIPPED: git is not there"; exit 0; }
script=$(cd "$(dirname "$0")/../../runtime/cli" && pwd)/commit.cmake
rm -rf "$1"
mkdir -p "$1/repository"
cd "$1/repository"
export GIT_CONFIG_GLOBAL=/dev/null GIT_CONFIG_SYSTEM=/dev/null GIT_CEILING_DIRECTORIES=${PWD%/*}
export GIT_AUTHOR_NAME=a GIT_AUTHOR_EMAIL=a@b GIT_COMMITTER_NAME=a GIT_COMMITTER_EMAIL=a@b
write() { "$2" -DOUT="$PWD/../dn_commit.h" -DROOT="$PWD" -P "$script"; }
expect() {
  write "$@"
  local is
  is=$(cat ../dn_commit.h)
  [ "$is" = "#define DN_COMMIT \"$want\"" ] || { echo "is $is, expected $want"; exit 1; }
}
want=unknown
expect "$@" # no repository
git init -q .
echo 1 >CMakeLists.txt
git add CMakeLists.txt
git commit -q -m one
want=$(git rev-parse --short=12 HEAD)
expect "$@"
touch -d 2020-01-01 ../dn_commit.h
expect "$@"
[ "$(stat -c %Y ../dn_commit.h)" = "$(date -d 2020-01-01 +%s)" ] || { echo "written though nothing is new"; exit 1; }
echo 2 >CMakeLists.txt
want=$(git rev-parse --short=12 HEAD)-dirty
expect "$@"
git commit -q -a -m two
want=$(git rev-parse --short=12 HEAD)
expect "$@"
git tag -m "a version" v1.2
want=v1.2
expect "$@"
# Sources that were unpacked within another's repository are not of its commit.
mkdir unpacked
cp CMakeLists.txt unpacked
(cd unpacked && "$2" -DOUT="$PWD/../../dn_commit.h" -DROOT="$PWD" -P "$script")
grep -q '"unknown"' ../dn_commit.h || { echo "$(cat ../dn_commit.h) in another's repository"; exit 1; }
