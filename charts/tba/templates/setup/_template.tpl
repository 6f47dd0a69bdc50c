{{/* The pod of the setup Job, in the trainer's image: bucket, models, prompts. May be repeated at any time. */}}
{{- define "tba.setup.template" -}}
{{- $of := dict "root" . "component" "setup" -}}
{{- $createBucket := kindIs "invalid" .Values.setup.createBucket | ternary .Values.objectstore.enabled .Values.setup.createBucket -}}
metadata: {{- include "tba.podMetadata" $of | nindent 2 }}
spec:
  {{- include "tba.podBase" $of | nindent 2 }}
  restartPolicy: Never
  {{- include "tba.initContainers" $of | nindent 2 }}
  containers:
    - name: setup
      {{- include "tba.containerBase" (merge (dict "image" "trainer") $of) | nindent 6 }}
      command:
        - tba
        - setup
        - --config
        - /etc/tba/recipe.toml
        {{- if $createBucket }}
        - --create-bucket
        {{- end }}
        {{- if .Values.setup.prepare }}
        - --prepare
        {{- end }}
      env: {{- include "tba.env" $of | nindent 8 }}
      resources: {{- include "tba.resources" (dict "resources" .Values.setup.resources) | nindent 8 }}
      volumeMounts: {{- include "tba.volumeMounts" $of | nindent 8 }}
  volumes: {{- include "tba.volumes" $of | nindent 4 }}
{{- end }}
