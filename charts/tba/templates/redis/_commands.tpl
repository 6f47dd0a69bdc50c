{{/* The truth of the run: the buffer refuses a Redis without append-only file, or with a weaker fsync than its recipe's. */}}
{{- define "tba.redis.args" -}}
- --appendonly
- "yes"
- --appendfsync
- always
- --maxmemory-policy
- noeviction
{{- with include "tba.redis.maxmemory" . }}
- --maxmemory
- {{ . | quote }}
{{- end }}
- --auto-aof-rewrite-min-size
- 1gb
- --rdbcompression
- "no"
- --save
- ""
- --dir
- /data
{{- if .Values.redis.tls.existingSecret }}
- --port
- "0"
- --tls-port
- "6379"
- --tls-cert-file
- /etc/redis-tls/tls.crt
- --tls-key-file
- /etc/redis-tls/tls.key
- --tls-ca-cert-file
- /etc/redis-tls/ca.crt
- --tls-auth-clients
- "no"
{{- end }}
{{- end }}

{{/* Cuts what a crash left written by half off the append-only file, then becomes Redis: an init container would not run
again when this container alone is restarted. The password goes through a file in memory, so that the list of processes
does not show it. */}}
{{- define "tba.redis.command" -}}
command:
  - sh
  - -c
  - |
    umask 077
    printf 'requirepass "%s"\n' "$(sed 's/[\\"]/\\&/g' /etc/redis-password/redis-password)" > /tmp/redis.conf
    set -- redis-server /tmp/redis.conf "$@"
    {{- .Files.Get "files/start_redis.sh" | trimPrefix "#!/bin/sh\n" | trim | nindent 4 }}
  - start_redis
{{- end }}

{{/* Exit 0 when Redis answers; while it loads its file it does not. */}}
{{- define "tba.redis.ping" -}}
{{- $tls := empty .Values.redis.tls.existingSecret | ternary "" "--tls --cacert /etc/redis-tls/ca.crt " -}}
REDISCLI_AUTH=$(cat /etc/redis-password/redis-password) redis-cli {{ $tls }}ping | grep -q PONG
{{- end }}

{{/* Redis refuses writes there, and the buffer says so; killed at its limit it would be killed again while it reads its file. */}}
{{- define "tba.redis.maxmemory" -}}
{{- $limit := (.Values.redis.resources.limits | default dict).memory | default "" | toString -}}
{{- if .Values.redis.maxmemory }}{{ .Values.redis.maxmemory }}
{{- else if regexMatch "^[0-9]+[MG]i$" $limit }}
{{- $number := regexFind "^[0-9]+" $limit | int }}
{{- hasSuffix "Gi" $limit | ternary (mul $number 512) (div $number 2) }}mb
{{- end }}
{{- end }}
