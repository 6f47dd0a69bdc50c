{{/* The claim of a StatefulSet: dict root, component, persistence. */}}
{{- define "tba.claim" -}}
metadata:
  name: data
  labels: {{- include "tba.selector" . | nindent 4 }}
  {{- with .persistence.annotations }}
  annotations: {{- toYaml . | nindent 4 }}
  {{- end }}
spec:
  accessModes: {{- toYaml .persistence.accessModes | nindent 4 }}
  {{- with .persistence.storageClass }}
  storageClassName: {{ . }}
  {{- end }}
  resources:
    requests: {storage: {{ include "tba.quantity" .persistence.size | quote }}}
{{- end }}
