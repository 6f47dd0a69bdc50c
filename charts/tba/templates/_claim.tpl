{{/* The claim of a StatefulSet: dict root, component, persistence. */}}
{{- define "tba.claim" -}}
metadata:
  name: data
  labels: {{- include "tba.selector" . | nindent 4 }}
spec:
  accessModes: [ReadWriteOnce]
  {{- with .persistence.storageClass }}
  storageClassName: {{ . }}
  {{- end }}
  resources:
    requests: {storage: {{ include "tba.quantity" .persistence.size | quote }}}
{{- end }}
