{{/* How to make the Secrets that the values name, with the keys that they name. */}}
{{- define "tba.notes.secrets" -}}
{{- $store := .Values.store -}}
{{- $made := dict "auth" "tba-tokens" "redis" "tba-redis" "write" "tba-store" "read" "tba-store-read" -}}
{{- $named := dict "auth" .Values.auth.existingSecret "redis" .Values.redis.auth.existingSecret "write" $store.credentialsSecret "read" $store.readOnlyCredentialsSecret -}}
{{- $own := list -}}
{{- range $part, $name := $named }}
{{- if and $name (ne $name (get $made $part)) }}{{ $own = append $own $part }}{{ end }}
{{- end -}}
{{- range $role, $key := .Values.auth.keys }}
{{- if ne $key (printf "%s.json" $role) }}{{ $own = append $own "auth" }}{{ end }}
{{- end -}}
{{- if or (ne $store.accessKeyIdKey "AWS_ACCESS_KEY_ID") (ne $store.secretAccessKeyKey "AWS_SECRET_ACCESS_KEY") }}{{ $own = concat $own (list "write" "read") }}{{ end -}}
{{- if ne .Values.redis.auth.key "redis-password" }}{{ $own = append $own "redis" }}{{ end -}}
{{- if not $own -}}
deploy/make-secrets --kubernetes {{ .Release.Namespace }} | kubectl apply -f -
{{- else -}}
deploy/make-secrets    # the files; yours have names or keys of their own:
{{- $create := printf "kubectl -n %s create secret generic" .Release.Namespace }}
{{ $create }} {{ $named.auth }}
{{- range $role, $key := .Values.auth.keys }} --from-file={{ $key }}=secrets/tokens/{{ $role }}.json{{ end }}
{{- with $named.redis }}
{{ $create }} {{ . }} --from-file={{ $.Values.redis.auth.key }}=secrets/redis_password
{{- end }}
{{- range $part := list "write" "read" }}
{{- with get $named $part }}
{{ $create }} {{ . }} --from-literal={{ $store.accessKeyIdKey }}=ID --from-literal={{ $store.secretAccessKeyKey }}=SECRET    # keys that {{ $part }}
{{- end }}
{{- end }}
{{- end }}
{{- end }}
