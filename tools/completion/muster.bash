# bash completion for muster(1). What commands and options there are is read from --help, so that it is always right.

_muster() {
  local muster=${COMP_WORDS[0]} word=${COMP_WORDS[COMP_CWORD]} help at type
  COMPREPLY=()
  if ((COMP_CWORD == 1)); then
    help=$("$muster" --help 2>/dev/null) || return
    mapfile -t COMPREPLY < <(compgen -W "$(sed -n 's/^  \([a-z][a-z]*\) .*/\1/p' <<<"$help") --help" -- "$word")
    return
  fi
  help=$("$muster" "${COMP_WORDS[1]}" --help 2>/dev/null) || return

  # The word's place: an option's value, of the type that --help gives it, or what follows the program of `run`.
  for ((at = 2; at < COMP_CWORD; ++at)); do
    case ${COMP_WORDS[at]} in
      --) ((++at)); break ;;
      -?*)
        type=$(_muster_type "$help" "${COMP_WORDS[at]}")
        # "--last=3" comes as three words
        if [[ -n $type && ${COMP_WORDS[at + 1]} == = ]]; then
          ((++at))
          ((at + 1 >= COMP_CWORD)) && break
          ((++at))
        elif [[ -n $type ]]; then
          ((at + 1 == COMP_CWORD)) && break
          ((++at))
        fi
        type=
        ;;
      *) break ;;
    esac
  done
  if [[ -n $type ]]; then
    [[ $word != = ]] || word=
    case $type in
      FILE*) mapfile -t COMPREPLY < <(compgen -f -- "$word") ;;
      DIR*) mapfile -t COMPREPLY < <(compgen -d -- "$word") ;;
      ID*) mapfile -t COMPREPLY < <(compgen -W "$("$muster" ps 2>/dev/null | awk 'NR > 1 { print $1 }')" -- "$word") ;;
      PID*) mapfile -t COMPREPLY < <(compgen -W "$("$muster" ps 2>/dev/null | awk 'NR > 1 { print $2 }')" -- "$word") ;;
      *\|*) mapfile -t COMPREPLY < <(compgen -W "$(tr '|' ' ' <<<"${type%%=*}")" -- "$word") ;;
    esac
  elif ((at < COMP_CWORD)) && [[ ${COMP_WORDS[1]} == run ]]; then
    if declare -F _command_offset >/dev/null; then _command_offset "$at"; else compopt -o default 2>/dev/null; fi
  elif [[ $word == -* ]]; then
    mapfile -t COMPREPLY < <(compgen -W "$(grep -oE '^  (-[a-z],)?(--[a-z-]+)?' <<<"$help" | tr ',' ' ')" -- "$word")
  elif [[ ${COMP_WORDS[1]} == run ]]; then
    mapfile -t COMPREPLY < <(compgen -c -- "$word"; compgen -f -- "$word")
  else
    mapfile -t COMPREPLY < <(compgen -f -- "$word")
  fi
}

# The type of an option's value, e.g. FILE or auto|none|cores=auto; nothing for a flag.
_muster_type() {
  local names type
  while read -r names type; do
    [[ ,$names, == *,"$2",* ]] && printf '%s' "$type"
  done < <(sed -nE 's/^  ((-[a-z],)?--[a-z-]+|-[a-z]) ([A-Za-z|]+(=[^ ]*)?)( .*)?$/\1 \3/p' <<<"$1")
}

complete -F _muster muster
