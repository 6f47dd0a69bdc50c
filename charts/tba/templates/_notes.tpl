{{/* How to make the Secrets that the values name, with the keys that the chart reads. */}}
{{- define "tba.notes.secrets" -}}
{{- $store := .Values.store -}}
{{- $made := dict "auth" "tba-tokens" "redis" "tba-redis" "write" "tba-store" "read" "tba-store-read" -}}
{{- $named := dict "auth" .Values.auth.existingSecret "redis" .Values.redis.auth.existingSecret "write" $store.credentialsSecret "read" $store.readOnlyCredentialsSecret -}}
{{- $own := list -}}
{{- range $part, $name := $named }}
{{- if and $name (ne $name (get $made $part)) }}{{ $own = append $own $part }}{{ end }}
{{- end -}}
{{- if not $own -}}
deploy/make-secrets --kubernetes {{ .Release.Namespace }} | kubectl apply -f -
{{- else -}}
deploy/make-secrets    # the files; yours have names of their own:
{{- $create := printf "kubectl -n %s create secret generic" .Release.Namespace }}
{{ $create }} {{ $named.auth }}
{{- range list "buffer" "operator" "reward" "searcher" "trainer" "viewer" }} --from-file=secrets/tokens/{{ . }}.json{{ end }}
{{- with $named.redis }}
{{ $create }} {{ . }} --from-file=redis-password=secrets/redis_password
{{- end }}
{{- range $part := list "write" "read" }}
{{- with get $named $part }}
{{ $create }} {{ . }} --from-literal=AWS_ACCESS_KEY_ID=ID --from-literal=AWS_SECRET_ACCESS_KEY=SECRET    # keys that {{ $part }}
{{- end }}
{{- end }}
{{- end }}
{{- end }}
