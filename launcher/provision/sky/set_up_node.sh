#!/bin/sh
# Makes a machine into a node: ~/spotrl/env (Python with the exact versions of node.lock and our wheel) and
# ~/spotrl/work (the job's files) from ~/spotrl/bundle. SkyPilot runs it as the node's user; an image may have run it.
#
# What was made is named by its digest, written last: the second run says so and ends, and a run that was killed half
# way is done again. Two runs at once wait for one another. The last line of the output says what is wrong, if anything.
#
# SPOTRL_STORE, if set, is the run's bucket. An environment that another node of the run has put there is fetched
# (engine/node/environment.py); without one, uv or pip builds the environment, and .built asks the agent to send it.
set -eu
umask 077

root=$HOME/spotrl
bundle=$root/bundle
env=$root/env
began=$(date +%s)
step="it began"

say() { echo "spotrl set-up, $(($(date +%s) - began)) s: $*"; }
fail() {
    step=
    say "failed: $*" >&2
    exit 1
}
# Not `trap ... EXIT` alone: dash runs it with the status of the last command, which is what we want to show.
trap 'status=$?; [ "$status" = 0 ] || [ -z "$step" ] || say "failed with $status while $step" >&2' EXIT
is() { [ "$(cat "$1" 2>/dev/null || true)" = "$2" ]; }
write() {
    printf '%s' "$2" >"$1.new"
    mv "$1.new" "$1"
}

[ -f "$bundle/digest" ] || fail "there is no $bundle/digest; the bundle has to be copied to $bundle first"
command -v flock >/dev/null || fail "this image has no program flock; install the package util-linux in it"
mkdir -p "$root"
exec 9>>"$root/set-up.lock"
flock 9

digest=$(cat "$bundle/digest")
environment=$(cat "$bundle/environment")
if is "$env/.digest" "$digest"; then
    say "$digest is there already"
    exit 0
fi
rm -f "$env/.digest"

find_uv() {
    for uv in uv "$HOME/.local/bin/uv"; do
        if command -v "$uv" >/dev/null; then
            return 0
        fi
    done
    return 1
}

find_python() {
    # 3.11 first: the tests run with it, and the nodes of a Ray cluster need the same one.
    for python in python3.11 python3.12 python3.13 python3.14 python3; do
        if "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
            return 0
        fi
    done
    return 1
}

# Makes an empty $env, and the function `install` for it.
begin() {
    rm -rf "$env"
    if find_uv; then
        step="uv made $env"
        "$uv" venv --quiet --python 3.11 "$env" || "$uv" venv --quiet --clear --python '>=3.11' "$env" ||
            fail "uv finds no Python 3.11 or newer; install python3.11 in the image"
        install() { "$uv" pip install --quiet --python "$env/bin/python" "$@"; }
    elif find_python; then
        step="$python made $env"
        "$python" -m venv "$env" ||
            fail "$("$python" --version) makes no environment; install python3-venv, or uv, in the image"
        install() { "$env/bin/python" -m pip install --quiet --disable-pip-version-check --no-input "$@"; }
    else
        fail "this image has neither uv nor Python 3.11 or newer ($(python3 --version 2>&1 || true)); install one"
    fi
}

# A lock names everything, with hashes: no other file is installed, whatever the index serves.
install_locked() { install --no-deps --require-hashes -r "$1"; }

# Fills $env from the bucket. Fails if that is not possible; $env may then be half full.
fetch() {
    [ -n "${SPOTRL_STORE:-}" ] || return 1
    # What the fetch itself needs: the client of buckets, with the hashes on the indented lines below its name.
    wanted=
    while IFS= read -r line; do
        case $line in
        obstore==* | typing-extensions==*) wanted=1 ;;
        [!\ ]*) wanted= ;;
        esac
        [ -z "$wanted" ] || printf '%s\n' "$line"
    done <"$bundle/node.lock" >"$root/fetch.lock"
    install_locked "$root/fetch.lock" || return 1
    (PYTHONPATH=$(echo "$bundle"/spotrl-*.whl) && export PYTHONPATH &&
        "$env/bin/python" -m engine.node.environment fetch "$SPOTRL_STORE" "$env" "$environment") || return 1
    "$env/bin/python" -c 'import engine.node.remote_console'
}

if is "$env/.environment" "$environment"; then
    say "the environment is there already"
else
    # What an earlier run left half done, or another version of us, is of no use.
    begin
    say "$("$env/bin/python" --version)"
    if fetch; then
        say "the environment was fetched from $SPOTRL_STORE"
    else
        [ -z "${SPOTRL_STORE:-}" ] || begin
        say "installing what node.lock names"
        step="what node.lock names was installed"
        install_locked "$bundle/node.lock"
        say "installing spotrl"
        step="spotrl was installed"
        # Copied even where uv is set to link: a link into this machine's cache would lead nowhere on the next node.
        (export UV_LINK_MODE=copy && install --no-deps "$bundle"/spotrl-*.whl)
        "$env/bin/python" -c 'import engine.node.remote_console'
        : >"$env/.built"
    fi
    write "$env/.environment" "$environment"
fi

step="the job's files were copied"
rm -rf "$root/work.new"
mkdir -p "$root/work.new" "$bundle/work"
cp -R "$bundle/work/." "$root/work.new/"
rm -rf "$root/work"
mv "$root/work.new" "$root/work"

write "$env/.digest" "$digest"
say "done: $digest"
