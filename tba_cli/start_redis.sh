#!/bin/sh
# start_redis.sh REDIS_SERVER [ARGUMENT ...]: make the append-only file end with something whole, then become Redis.
#
# A crash or a full disk can end that file in the middle of a transaction (MULTI ... EXEC; every script is one). Redis
# itself then cuts only the command that is not whole, keeps `MULTI` and what follows it, and writes the next transaction
# behind it; at the start after that the two are carried out as one, and what was acknowledged is lost (ADR 16).
# So here the whole transaction is cut off, which nobody was told had been stored: Redis answers after it has written.
# Redis is told to refuse such a file by itself (aof-load-truncated no), should this script not have seen it.
#
# Only a part at the very end, with nothing whole behind it, is cut. Anything else that is wrong with the file is logged,
# and Redis is not started. redis-check-aof is the reader: the same binary under another name.
set -u

made= # a folder for the time of the check
trap 'rm -rf "$made"' EXIT

log() { printf 'start_redis: %s\n' "$*"; }

refuse() {
    log "$1: $2. Redis is not started, and nothing was changed: what was acknowledged may be damaged. Keep a copy of" \
        "the folder; then restore it from a backup, or start Redis on an empty folder and begin a new run with the last" \
        "snapshot (tba buffer load RUN/NAME)"
    exit 1
}

# find_checker SERVER: sets `checker`
find_checker() {
    path=$(command -v "$1") || return 1
    checker=$(dirname "$path")/redis-check-aof
    [ -x "$checker" ] && return 0
    [ "$(head -c 2 "$path")" != '#!' ] || return 1
    made=$(mktemp -d) || return 1
    checker=$made/redis-check-aof
    ln -s "$path" "$checker"
}

# repair FILE: cut a torn end
repair() {
    report=$("$checker" "$1" </dev/null 2>&1) && return 0
    sizes=$(printf '%s\n' "$report" | sed -n 's/^AOF analyzed: .*size=\([0-9]*\), ok_up_to=\([0-9]*\), .*/\1 \2/p')
    if [ -z "$sizes" ]; then
        log "$1 could not be checked ($(printf '%s\n' "$report" | tail -n 1)); Redis itself will say whether it is whole"
        return 0
    fi
    size=${sizes% *} whole=${sizes#* }
    error=$(printf '%s\n' "$report" | sed -n 's/^0x *\([0-9a-f]*: .*\)/\1/p' | tail -n 1)
    case "$report" in *'format error'*) refuse "$1" "it holds no command at byte $whole" ;; esac
    case "$error" in
        '' | *': Expected to read '[0-9]* | *': Reached EOF '*) ;; # the end of the file came first
        *': Expected \r\n'*)
            if [ "$(tail -c +$((0x${error%%:*} + 1)) "$1" | wc -l)" -ne 0 ]; then
                refuse "$1" "it is damaged after byte $whole, and more follows ($error)"
            fi
            ;;
        *': Unexpected MULTI'*)
            refuse "$1" "a transaction that was written by half stands at byte $whole, and whole ones follow it"
            ;;
        *) refuse "$1" "it is damaged after byte $whole, and more follows ($error)" ;;
    esac
    # in lines that begin at each `*`: as one line, hundreds of MB take grep minutes, and all memory
    tail -c +$((whole + 1)) "$1" | LC_ALL=C tr '*\r\n' '\n#|' | LC_ALL=C grep -q '^1#|[$]4#|EXEC#|'
    case $? in
        1) ;; # none; any other number says that grep could not look, or was ended
        0) refuse "$1" "it is damaged after byte $whole, and what follows looks like a whole transaction" ;;
        *) refuse "$1" "it is damaged after byte $whole, and what follows could not be searched for whole transactions" ;;
    esac
    if [ "$(wc -c <"$1")" -ne "$size" ] || ! dd if=/dev/null of="$1" bs=1 seek="$whole" count=0 2>/dev/null; then
        refuse "$1" "its last $((size - whole)) bytes were written by half and could not be cut off"
    fi
    log "$1: cut off its last $((size - whole)) of $size bytes, a command or transaction that was written by half and" \
        "so never acknowledged"
}

folder=. name=appendonly.aof parts=appendonlydir option=
for word; do
    case "$option" in
        --dir) folder=$word ;;
        --appendfilename) name=$word ;;
        --appenddirname) parts=$word ;;
    esac
    option=$word
done
last=$(sed -n 's/^file \([^ /]*\) seq [0-9]* type [bi].*/\1/p' "$folder/$parts/$name.manifest" 2>/dev/null | tail -n 1)
for file in "$folder/$name" "$folder/$parts/${last:-.}"; do # Redis 6 has one file; from 7 on, several, and a list
    [ -f "$file" ] && [ -s "$file" ] || continue
    if [ -z "${checker-}" ] && ! find_checker "$1"; then
        log "there is no redis-check-aof beside $1, so $file was not checked; Redis itself will say whether it is whole"
        break
    fi
    repair "$file"
done
rm -rf "$made"
# with SIGTERM blocked for `tba run`, which ends Redis last (by SIGINT); a shell unblocks it whenever it waits
exec ${BLOCK_WITH:+"$BLOCK_WITH" -ISc 'import os, signal, sys
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGHUP, signal.SIGTERM])
os.execvp(sys.argv[1], sys.argv[1:])'} "$@" --aof-load-truncated no
