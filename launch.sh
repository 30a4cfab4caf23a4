#!/usr/bin/env bash
# From nothing to a running server: ./launch.sh [RECIPE] [--dry-run] [--setup-only] [-- vllm flags]
set -euo pipefail

usage() {
    cat <<'EOF'
Usage: ./launch.sh [RECIPE] [--dry-run] [--setup-only] [--with EXTRA] [-- flags for vllm serve]

Installs what is missing into .venv (once), then serves RECIPE: a file, or a name in recipes/.
Without RECIPE: smollm2-135m-auto, the model that comes with it; with MODEL set, ngram-any.

  --dry-run      print the vllm serve command and stop
  --setup-only   install and stop
  --with EXTRA   install an extra of pyproject.toml too (test, dev, bench, train); may be repeated

Environment:
  MODEL              a model folder or hub name, in place of the recipe's
  HOST, PORT         where to listen (127.0.0.1, 8000)
  PYTHON             the Python (3.11 or later) to make .venv with
  VLLM_SPECX_DEVICE  cpu or gpu, in place of asking nvidia-smi
  VLLM_SPECX_CACHE   where the embedded model is kept (~/.cache/vllm_specx)
EOF
}

fail() {
    echo "launch.sh: $*" >&2
    exit 2
}

root=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
recipe="" dry_run=() setup_only=false extras=()
while (($#)); do
    case $1 in
        -h | --help) usage && exit 0 ;;
        --dry-run) dry_run=(--dry-run) ;;
        --setup-only) setup_only=true ;;
        --with) (($# > 1)) || fail "--with needs the name of an extra."; extras+=("$2"); shift ;;
        --) shift; break ;;
        -*) fail "unknown option $1; flags for vllm serve go after --, and --help shows the rest." ;;
        *) [[ -z $recipe ]] || fail "one recipe at a time, not $recipe and $1."; recipe=$1 ;;
    esac
    shift
done
for extra in ${extras[@]+"${extras[@]}"}; do
    [[ $extra =~ ^(test|dev|bench|train)$ ]] || fail "unknown extra $extra; known: test, dev, bench, train."
done

# The first Python that runs and is new enough. A pyenv shim may exist and still fail.
find_python() {
    local candidate own="$root/.venv"
    # An environment whose making was cut off is made anew, so not by its own Python.
    [[ ! -e $own/.vllm_specx.changing ]] || own=
    for candidate in ${PYTHON:+"$PYTHON"} ${own:+"$own/bin/python"} python3 \
        python3.11 python3.12 python3.13 /usr/bin/python3; do
        if "$candidate" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 15))' \
            >/dev/null 2>&1; then
            echo "$candidate"
            return
        elif [[ $candidate == "${PYTHON:-}" ]]; then
            fail "PYTHON=$PYTHON is not a working Python 3.11 to 3.14."
        fi
    done
    fail "no Python 3.11 to 3.14 found; install one, or name it: PYTHON=/path/to/python3.11 ./launch.sh"
}

python=$(find_python)
PYTHONPATH=$root "$python" -m vllm_specx.setup "$root/.venv" ${extras[@]+"${extras[@]}"} || exit $?
$setup_only && exit 0

: "${recipe:=$([[ -n ${MODEL:-} ]] && echo ngram-any || echo smollm2-135m-auto)}"
exec "$root/.venv/bin/python" -m vllm_specx.cli serve ${dry_run[@]+"${dry_run[@]}"} "$recipe" -- "$@"
