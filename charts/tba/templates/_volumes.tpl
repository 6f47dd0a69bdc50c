{{/* Volumes and mounts of the pods of tba. */}}

{{/* Secret with the authorities that the buffer trusts for Redis. */}}
{{- define "tba.redisCaSecret" -}}
{{- .Values.redis.enabled | ternary .Values.redis.tls.existingSecret .Values.redis.external.caSecret -}}
{{- end }}

{{/* Secret whose ca.crt is tls.ca_file: dict root, component. */}}
{{- define "tba.caSecret" -}}
{{- if .root.Values.searchersOnly.enabled }}{{ .root.Values.searchersOnly.caSecret }}
{{- else if .root.Values.tls.existingSecret }}{{ .root.Values.tls.existingSecret }}
{{- else if eq .component "buffer" }}{{ include "tba.redisCaSecret" .root }}
{{- end }}
{{- end }}

{{/* Whether a component holds model folders: searcher, trainer, setup, and the reward service if it needs them. */}}
{{- define "tba.holdsModels" -}}
{{- if or (has .component (list "searcher" "trainer" "setup")) (and (eq .component "reward") .root.Values.reward.needsModels) }}yes{{ end }}
{{- end }}

{{/* What of the tokens' Secret a component sees: the file of its own role as tokens.json; the test pod, which pushes as a
searcher, reads as a viewer too. */}}
{{- define "tba.tokensItems" -}}
{{- $role := get (dict "setup" "operator" "test" "searcher") .component | default .component -}}
- {key: {{ $role }}.json, path: tokens.json}
{{- if eq .component "test" }}
- {key: viewer.json, path: viewer.json}
{{- end }}
{{- end }}

{{- define "tba.volumeMounts" -}}
{{- $root := .root -}}
- {name: recipe, mountPath: /etc/tba, readOnly: true}
- {name: tokens, mountPath: /etc/tba-tokens, readOnly: true}
- {name: tmp, mountPath: /tmp}
{{- if and $root.Values.tls.existingSecret (has .component (list "buffer" "reward")) }}
- {name: tls, mountPath: /etc/tba-tls, readOnly: true}
{{- end }}
{{- if include "tba.caSecret" . }}
- {name: ca, mountPath: /etc/tba-ca, readOnly: true}
{{- end }}
{{- if $root.Values.store.caSecret }}
- {name: store-ca, mountPath: /etc/tba-store-ca, readOnly: true}
{{- end }}
{{- if and (eq .component "buffer") $root.Values.redis.auth.existingSecret }}
- {name: redis-password, mountPath: /etc/tba-redis, readOnly: true}
{{- end }}
{{- if include "tba.holdsModels" . }}
- {name: models, mountPath: /app/models{{ if .modelsReadOnly }}, readOnly: true{{ end }}}
{{- end }}
{{- if eq .component "setup" }}
- {name: data, mountPath: /app/data}
{{- end }}
{{- if (dig "shm" "sizeLimit" "" (get $root.Values .component | default dict)) }}
- {name: shm, mountPath: /dev/shm}
{{- end }}
{{- if (dig "weightCache" "volume" dict (get $root.Values .component | default dict)) }}
- {name: weight-cache, mountPath: /weight-cache}
{{- end }}
{{- if and (eq .component "searcher") $root.Values.searcher.openai.url }}
- {name: openai-weights, mountPath: /openai-weights}
{{- end }}
{{- with (include "tba.podValues" . | fromYaml).extraVolumeMounts }}
{{ toYaml . }}
{{- end }}
{{- end }}

{{- define "tba.volumes" -}}
{{- $root := .root -}}
{{- $pod := include "tba.podValues" . | fromYaml -}}
- name: recipe
  configMap: {name: {{ include "tba.fullname" $root }}-recipe}
- name: tokens
  secret:
    secretName: {{ $root.Values.auth.existingSecret }}
    defaultMode: 0440
    items: {{- include "tba.tokensItems" . | nindent 6 }}
- name: tmp {{- toYaml ($pod.tmpVolume | default (dict "emptyDir" dict)) | nindent 2 }}
{{- if and $root.Values.tls.existingSecret (has .component (list "buffer" "reward")) }}
- name: tls
  secret:
    secretName: {{ $root.Values.tls.existingSecret }}
    defaultMode: 0440
    items: [{key: tls.crt, path: tls.crt}, {key: tls.key, path: tls.key}]
{{- end }}
{{- with include "tba.caSecret" . }}
- name: ca
  secret: {secretName: {{ . }}, defaultMode: 0440, items: [{key: ca.crt, path: ca.crt}]}
{{- end }}
{{- with $root.Values.store.caSecret }}
- name: store-ca
  secret: {secretName: {{ . }}, defaultMode: 0440, items: [{key: ca.crt, path: ca.crt}]}
{{- end }}
{{- if eq .component "buffer" }}
{{- with $root.Values.redis.auth.existingSecret }}
- name: redis-password
  secret: {secretName: {{ . }}, defaultMode: 0440, items: [{key: redis-password, path: redis-password}]}
{{- end }}
{{- end }}
{{- if include "tba.holdsModels" . }}
{{- if $root.Values.models.existingClaim }}
- name: models
  persistentVolumeClaim: {claimName: {{ $root.Values.models.existingClaim }}}
{{- else }}
{{- $source := eq .component "setup" | ternary dict $root.Values.models.cacheVolume }}
- name: models {{- toYaml ($source | default (dict "emptyDir" dict)) | nindent 2 }}
{{- end }}
{{- end }}
{{- if eq .component "setup" }}
- name: data
  emptyDir: {}
{{- end }}
{{- with (dig "shm" "sizeLimit" "" (get $root.Values .component | default dict)) }}
- name: shm
  emptyDir: {medium: Memory, sizeLimit: {{ include "tba.quantity" . | quote }}}
{{- end }}
{{- with (dig "weightCache" "volume" dict (get $root.Values .component | default dict)) }}
- name: weight-cache {{- toYaml . | nindent 2 }}
{{- end }}
{{- if and (eq .component "searcher") $root.Values.searcher.openai.url }}
- name: openai-weights {{- toYaml $root.Values.searcher.openai.weights.volume | nindent 2 }}
{{- end }}
{{- with $pod.extraVolumes }}
{{ toYaml . }}
{{- end }}
{{- end }}

{{/* Init containers: the user's own, a native sidecar among them first, and the one that fills a pod's cache of models from
the object store: dict root, component. */}}
{{- define "tba.initContainers" -}}
{{- $own := (include "tba.podValues" . | fromYaml).extraInitContainers -}}
{{- $pulls := and (include "tba.holdsModels" .) (ne .component "setup") (not .root.Values.models.existingClaim) -}}
{{- if or $own $pulls -}}
initContainers:
  {{- with $own }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
  {{- if $pulls }}
  - name: models
    {{- include "tba.containerBase" (dict "root" .root "component" .component "image" .component) | nindent 4 }}
    command: [tba, model, pull, --config, /etc/tba/recipe.toml, --for, {{ .component }}, --wait-s, {{ .root.Values.models.waitS | int | quote }}]
    env: {{- include "tba.env" . | nindent 6 }}
    resources: {{- include "tba.resources" (dict "resources" (index .root.Values .component).resources) | nindent 6 }}
    volumeMounts: {{- include "tba.volumeMounts" . | nindent 6 }}
  {{- end }}
{{- end }}
{{- end }}
