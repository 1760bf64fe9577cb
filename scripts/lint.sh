#!/usr/bin/env bash
# make lint: what the compiler of a plain build does not say. Prints every finding as "file:line: text"; exit 1 if any.
set -u
cd "$(dirname "$0")/.."

findings=0
report() { # lines on stdin
    local line
    while IFS= read -r line; do
        echo "$line"
        findings=$((findings + 1))
    done
}

# The files of the tree: what git knows, and what it would add. Without git: all that is there.
tree() {
    { git ls-files -co --exclude-standard 2>/dev/null || find . -type f -not -path './build/*' | sed 's|^\./||'; } |
        while IFS= read -r file; do [ -f "$file" ] && echo "$file"; done | sort
}
mapfile -t files < <(tree)
mapfile -t sources < <(printf '%s\n' "${files[@]}" | grep -E '\.(c|h|cu|cuh)$')
mapfile -t units < <(printf '%s\n' "${sources[@]}" | grep -E '(\.c|^train_moe\.cu)$')

# ---- 1. floors: a file includes headers of its own folder and of lower floors only ----

floor_of() { # FILE: sets floor
    case $1 in
    kernels/base/*) floor=0 ;;
    kernels/comm/*) floor=2 ;;
    kernels/* | data/*) floor=1 ;;
    model/parallel/*) floor=4 ;;
    model/train/*) floor=5 ;;
    model/*) floor=3 ;;
    train_moe.cu) floor=6 ;;
    *) floor=9 ;;
    esac
}

check_floors() {
    local from line number include target from_floor
    while IFS=: read -r from number line; do
        include=${line#*\"}
        include=${include%%\"*}
        target=$include
        [ -f "${from%/*}/$include" ] && target=${from%/*}/$include
        [ -f "$target" ] || {
            echo "$from:$number: includes \"$include\", which is neither in its folder nor at the root"
            continue
        }
        floor_of "$from" && from_floor=$floor
        floor_of "$target"
        if [ "$floor" -gt "$from_floor" ]; then
            echo "$from:$number: upward arrow: includes \"$include\" (floor $from_floor includes floor $floor)"
        elif [[ $from == data/* && $target == kernels/* && $target != kernels/base/* ]] ||
            [[ $from == kernels/* && $target == data/* ]]; then
            echo "$from:$number: kernels/ and data/ do not know each other: includes \"$include\""
        elif [[ $from == kernels/cpu/* && $target == kernels/cuda/* || $from == kernels/cuda/* && $target == kernels/cpu/* ]]; then
            echo "$from:$number: the two backends do not know each other: includes \"$include\""
        fi
    done < <(grep -nHE '^[[:space:]]*#[[:space:]]*include[[:space:]]*"' "${sources[@]}")
}

# ---- 2. mirrored files: kernels/cpu and kernels/cuda have the same stems ----

MIRROR_EXCEPTIONS=" threads cublaslt errors memory profile " # how CPU threads wait; what only a GPU has

check_mirror() {
    [ -d kernels/cuda ] || return 0
    local stem
    while IFS= read -r stem; do
        [[ $MIRROR_EXCEPTIONS == *" $stem "* ]] && continue
        [ -f "kernels/cuda/$stem.cu" ] || echo "kernels/cpu/$stem.c: has no kernels/cuda/$stem.cu"
        [ -f "kernels/cpu/$stem.c" ] || echo "kernels/cuda/$stem.cu: has no kernels/cpu/$stem.c"
    done < <(printf '%s\n' "${files[@]}" |
        sed -nE 's|^kernels/cpu/([^/]*)\.c$|\1|p; s|^kernels/cuda/([^/]*)\.cu$|\1|p' | sort -u)
}

# ---- 3. format ----

check_format() {
    if ! command -v clang-format >/dev/null; then
        echo "note: clang-format is not installed: format not checked" >&2
        return 0
    fi
    clang-format --dry-run -Werror "${sources[@]}" 2>&1 | grep -E ': (error|warning):' |
        first_of_each_file 'not formatted (make format)'
    grep -nHE '.{121}' "${sources[@]}" | first_of_each_file 'longer than 120 columns'
}

# first_of_each_file TEXT: of lines "file:line:..." the first of a file, and how many there are.
first_of_each_file() {
    awk -F: -v text="$1" '{ if (!n[$1]++) first[$1] = $2 }
        END { for (f in n) printf "%s:%s: %s, %d places\n", f, first[f], text, n[f] }' | sort
}

# ---- 4. warnings of both compilers ----

check_warnings() {
    local compiler log=build/lint_warnings.txt unit flags language
    mkdir -p build
    for compiler in gcc clang; do
        if ! command -v $compiler >/dev/null; then
            echo "note: $compiler is not installed: its warnings not checked" >&2
            continue
        fi
        CC=$compiler scripts/probe.sh build/lint_$compiler.mk || echo "scripts/probe.sh:1: fails with $compiler"
        flags="-std=gnu11 -fsyntax-only -ffp-contract=fast -fno-math-errno -Wall -Wextra -Wshadow -Wstrict-prototypes"
        flags+=" -Werror -I. $(sed -n -E 's/^(OPENMP_FLAGS|LIB_CFLAGS|MPI_CFLAGS) :=//p; s/^HAVE_MPI := 1/-DHAVE_MPI/p' \
            build/lint_$compiler.mk | tr '\n' ' ')"
        grep -q '^OPENMP_FLAGS := -' build/lint_$compiler.mk || flags+=" -Wno-unknown-pragmas"
        flags+=" -DTRAIN_MOE_COMMIT=\"lint\" -DTRAIN_MOE_BUILD=\"lint\""
        for unit in "${units[@]}"; do
            language=
            [[ $unit == *.cu ]] && language="-x c"
            $compiler $flags $language "$unit"
            [[ $unit == kernels/* || $unit == model/*.c && $unit != model/train/* ]] &&
                $compiler $flags -DREAL_IS_DOUBLE "$unit"
        done >"$log" 2>&1
        grep -E ': (fatal )?error:' "$log" | sort -u
    done
}

# ---- 5. words, 6. top level ----

# The words are spelt with a class so that this file does not find itself.
check_words() {
    grep -nHwE 'TOD[O]|FIXM[E]|XX[X]|HAC[K]' "${files[@]}" 2>/dev/null | grep -v '^Binary' |
        sed -E 's/^([^:]*:[^:]*):.*/\1: an unfinished word: an issue or nothing/'
}

check_top_level() {
    printf '%s\n' "${files[@]}" | cut -d/ -f1 | sort -u |
        grep -vE '^(Makefile|train_moe\.cu|model|kernels|data|configs|scripts|tests|README\.md|LICENSE|\..*)$' |
        sed 's/$/: does not belong at the top level/'
}

# ---- 7. tests/CASES.md: every test that it names is there ----

# "file: name" is a TEST of a C file, by that or a macro around it, or words of a script. A file is named from tests/, or
# alone where one is so called.
check_cases() {
    local number item file name path found
    while IFS=: read -r number item; do
        [[ $item =~ ^(later|by\ hand):\ . ]] && continue
        file=${item%%: *} name=${item#*: }
        path=$(printf '%s\n' "${files[@]}" | grep -E "^tests/$file$" ||
            printf '%s\n' "${files[@]}" | grep -E "^tests/(.*/)?$file$" | grep -v '^tests/cuda/')
        found=
        case $path in
        *.c) grep -qE "^[A-Z_]+\($name\)" "$path" && found=1 ;;
        *.sh) grep -qF -- "$name" "$path" && found=1 ;;
        esac
        [ -n "$found" ] || echo "tests/CASES.md:$number: there is no test $item"
    done < <(awk -F' \\| ' '/^\| [A-Z][0-9]+ / { gsub(/ \|$/, "", $3); n = split($3, items, "; ")
        for (i = 1; i <= n; i++) print NR ":" items[i] }' tests/CASES.md)
}

for check in check_floors check_mirror check_format check_warnings check_words check_top_level check_cases; do
    report < <($check)
done
if [ "$findings" -gt 0 ]; then
    echo "lint: $findings findings"
    exit 1
fi
echo "lint: ${#sources[@]} files, clean"
