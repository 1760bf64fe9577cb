#!/usr/bin/env bash
# What the build needs and this machine does not have: shows the one command that installs it, and asks on a terminal
# before running it. YES=1 or CI=true runs it unasked. Installs nothing and prints nothing where all is there.
#
#     scripts/packages.sh [PROGRAM...]      each PROGRAM is a command that is needed besides (its package has its name)
set -eu
cd "$(dirname "$0")/.."

if [ -z "${CC:-}" ]; then
    CC=$(command -v gcc || command -v clang || echo cc)
    export CC
fi
missing=$(scripts/probe.sh --missing)
for program in make "$@"; do
    command -v "$program" >/dev/null || missing="$missing $program"
done
missing=$(echo $missing) # one line
[ -n "$missing" ] || exit 0

if ! command -v apt-get >/dev/null; then
    scripts/probe.sh build/config.mk || exit 1 # names the packages of other distributions
    echo "error: missing: $missing" >&2
    exit 1
fi

sudo=
if [ "$(id -u)" != 0 ]; then sudo="sudo "; fi
echo "missing: $missing"
echo "This installs it:"
echo "    ${sudo}apt-get update && ${sudo}apt-get install -y --no-install-recommends $missing"

if [ "${YES:-}" != 1 ] && [ "${CI:-}" != true ]; then
    if ! [ -t 0 ]; then
        echo "Run it, or say YES=1 to have it run." >&2
        exit 1
    fi
    read -r -p "Run it now? [y/N] " answer
    case $answer in [yY] | [yY]es) ;; *) exit 1 ;; esac
fi
if [ -n "$sudo" ]; then
    if ! command -v sudo >/dev/null; then
        echo "error: not root, and there is no sudo: run the command above as root" >&2
        exit 1
    fi
    [ -t 0 ] || sudo="sudo -n "
fi
export DEBIAN_FRONTEND=noninteractive
${sudo}apt-get update -q || echo "apt-get update failed; trying with the package lists that are there"
${sudo}apt-get install -q -y --no-install-recommends $missing
