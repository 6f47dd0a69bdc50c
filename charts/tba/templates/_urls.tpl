{{/* Where the parts of a release find each other. */}}

{{- define "tba.scheme" -}}
{{ empty .Values.tls.existingSecret | ternary "http" "https" }}
{{- end }}

{{- define "tba.bufferUrl" -}}
{{- if .Values.searchersOnly.enabled -}}
{{ .Values.searchersOnly.bufferUrl }}
{{- else -}}
{{ include "tba.scheme" . }}://{{ include "tba.fullname" . }}-buffer:8700
{{- end -}}
{{- end }}

{{- define "tba.rewardUrl" -}}
{{- if .Values.searchersOnly.enabled -}}
{{ .Values.searchersOnly.rewardUrl }}
{{- else -}}
{{ include "tba.scheme" . }}://{{ include "tba.fullname" . }}-reward:8701
{{- end -}}
{{- end }}

{{/* Whether the server in which searchers sample is none of their own pods: then it is one for all. */}}
{{- define "tba.sharedServer" -}}
{{- with .Values.searcher.openai.url }}
{{- if not (regexMatch "^https?://(localhost|127([.][0-9]{1,3}){3}|\\[::1\\])(:[0-9]+)?(/.*)?$" .) }}yes{{ end }}
{{- end }}
{{- end }}

{{- define "tba.redisUrl" -}}
{{- if .Values.redis.enabled -}}
{{ empty .Values.redis.tls.existingSecret | ternary "redis" "rediss" }}://{{ include "tba.fullname" . }}-redis:6379/0
{{- else -}}
{{ .Values.redis.external.url }}
{{- end -}}
{{- end }}

{{- define "tba.storeEndpoint" -}}
{{- if .Values.objectstore.enabled -}}
http://{{ include "tba.fullname" . }}-objectstore:9000
{{- else -}}
{{ .Values.store.endpointUrl }}
{{- end -}}
{{- end }}
