#!/usr/bin/env bash
# make deps-bundle: headers and static libraries of cJSON and zstd into deps/, which the Makefile prefers. So a tree can
# be carried to a machine that has a compiler and neither library. No root: what is installed is copied; a static library
# that the distribution does not ship (Debian has no libcjson.a) is built from the distribution's own source package.
set -eu
cd "$(dirname "$0")/.."
root=$PWD
CC=${CC:-cc}
cache=.cache/sources

fail() {
    printf 'error: %s\nhint:  %s\n' "$1" "$2" >&2
    exit 1
}

# header NAME: the folder of an installed header, as the compiler finds it.
header() {
    printf '#include <%s>\n' "$1" | $CC -E -xc - 2>/dev/null | sed -n "s|^# [0-9]* \"\(/.*\)/$1\".*|\1|p" | head -n 1
}

# fetch_source PACKAGE: unpacks the source package; prints its folder. Its own lists, so that nothing of the system's
# package state changes.
fetch_source() {
    local options
    command -v apt-get >/dev/null || fail "no static library of $1" "install it and run make deps-bundle again"
    command -v dpkg-source >/dev/null || fail "unpacking the source of $1 needs dpkg-source" "apt-get install dpkg-dev"
    rm -rf "$cache/$1"
    mkdir -p "$cache/lists/partial" "$cache/apt.d" "$cache/$1"
    rm -f "$cache"/apt.d/*
    for list in /etc/apt/sources.list /etc/apt/sources.list.d/*.list; do
        [ -f "$list" ] && sed -n 's/^deb /deb-src /p' "$list" >"$cache/apt.d/$(basename "$list" .list).list"
    done
    for list in /etc/apt/sources.list.d/*.sources; do
        [ -f "$list" ] && sed 's/^Types:.*/Types: deb-src/' "$list" >"$cache/apt.d/$(basename "$list")"
    done
    options=(-q -o Dir::Etc::sourcelist=/dev/null -o "Dir::Etc::sourceparts=$root/$cache/apt.d"
        -o "Dir::State::lists=$root/$cache/lists" -o "Dir::Cache=$root/$cache" -o APT::Sandbox::User=)
    (
        cd "$cache/$1"
        apt-get "${options[@]}" update
        apt-get "${options[@]}" source --download-only "$1"
        dpkg-source -x ./*.dsc source
    ) >"$cache/$1.log" 2>&1 || fail "cannot fetch the source package $1: $(tail -n 1 "$cache/$1.log")" \
        "see $cache/$1.log"
    echo "$cache/$1/source"
}

# bundle NAME HEADER_FOLDER_IN_DEPS HEADER PACKAGE
bundle() {
    local name=$1 folder=$2 include=$3 package=$4 from library
    from=$(header "$include")
    [ -n "$from" ] || fail "<$include> is not installed" "apt-get install $package"
    mkdir -p "deps/include/$folder" deps/lib
    cp "$from/${include%.h}"*.h "deps/include/$folder/"
    library=$($CC -print-file-name="lib$name.a")
    if [ -f "$library" ]; then
        cp "$library" deps/lib/
        echo "deps/lib/lib$name.a: copied from $(realpath "$library")"
    elif [ "$name" = cjson ]; then
        echo "libcjson.a is not installed: building it from the source package"
        from=$(fetch_source cjson)
        $CC -O2 -fPIC -I"$from" -c -o "$cache/cJSON.o" "$from/cJSON.c"
        ar rcs deps/lib/libcjson.a "$cache/cJSON.o"
        cp "$from/cJSON.h" deps/include/cjson/
        echo "deps/lib/libcjson.a: built from $(basename "$from"/../*.dsc .dsc)"
    else
        fail "lib$name.a is not installed" "Debian, Ubuntu: apt-get install $package; Fedora: dnf install $package-static"
    fi
}

rm -rf deps
bundle cjson cjson cjson/cJSON.h libcjson-dev
bundle zstd "" zstd.h libzstd-dev
echo "deps/: $(du -sh deps | cut -f1); the next make uses it"
