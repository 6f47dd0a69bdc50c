{{- define "tba.labels" -}}
app.kubernetes.io/name: tba
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
{{- end }}

{{- define "tba.selector" -}}
app.kubernetes.io/name: tba
app.kubernetes.io/instance: {{ .root.Release.Name }}
app.kubernetes.io/component: {{ .name }}
{{- end }}

{{- define "tba.redisUrl" -}}
{{ .Values.redis.externalUrl | default (printf "redis://%s-redis:6379/0" .Release.Name) }}
{{- end }}

{{- define "tba.env" -}}
- {name: TBA_BUFFER__REDIS_URL, value: {{ include "tba.redisUrl" . | quote }}}
- {name: TBA_BUFFER__HOST, value: "0.0.0.0"}
- {name: TBA_BUFFER__PORT, value: "8700"}
- {name: TBA_BUFFER__URL, value: "http://{{ .Release.Name }}-buffer:8700"}
- {name: TBA_REWARD__HOST, value: "0.0.0.0"}
- {name: TBA_REWARD__PORT, value: "8701"}
- {name: TBA_REWARD__URL, value: "http://{{ .Release.Name }}-reward:8701"}
- {name: TBA_STORE__URL, value: {{ required "store.url is required: the s3:// URL that weights and checkpoints go to" .Values.store.url | quote }}}
{{- with .Values.store.endpointUrl }}
- {name: TBA_STORE__ENDPOINT_URL, value: {{ . | quote }}}
{{- end }}
- {name: TBA_TRACKING__METRICS_PATH, value: /tmp/metrics.jsonl}
- {name: TBA_AUTH__TOKENS_FILE, value: /etc/tba-tokens/tokens.json}
{{- end }}

{{- define "tba.pod" -}}
{{- $root := .root -}}
automountServiceAccountToken: false
securityContext: {runAsNonRoot: true, runAsUser: 65532, fsGroup: 65532, seccompProfile: {type: RuntimeDefault}}
containers:
  - name: {{ .name }}
    image: "{{ $root.Values.image.registry }}/tba-{{ .name }}:{{ $root.Values.image.tag | default $root.Chart.AppVersion }}"
    imagePullPolicy: {{ $root.Values.image.pullPolicy }}
    workingDir: /app
    securityContext: {readOnlyRootFilesystem: true, allowPrivilegeEscalation: false, capabilities: {drop: [ALL]}}
    env:
      {{- include "tba.env" $root | nindent 6 }}
    {{- with $root.Values.store.credentialsSecret }}
    envFrom: [{secretRef: {name: {{ . }}}}]
    {{- end }}
    {{- with .port }}
    ports: [{name: http, containerPort: {{ . }}, protocol: TCP}]
    startupProbe: {httpGet: {path: /readyz, port: http}, periodSeconds: 2, failureThreshold: 150}
    readinessProbe: {httpGet: {path: /readyz, port: http}, periodSeconds: 5}
    livenessProbe: {httpGet: {path: /livez, port: http}, periodSeconds: 10}
    {{- end }}
    resources: {{- toYaml .resources | nindent 6 }}
    volumeMounts:
      - {name: recipe, mountPath: /etc/tba, readOnly: true}
      - {name: tokens, mountPath: /etc/tba-tokens, readOnly: true}
      - {name: tmp, mountPath: /tmp}
      {{- if $root.Values.modelClaim }}
      - {name: models, mountPath: /app/models, readOnly: true}
      {{- end }}
volumes:
  - {name: recipe, configMap: {name: {{ $root.Release.Name }}-recipe}}
  - name: tokens
    secret: {secretName: {{ required "tokensSecret is required: a Secret with key tokens.json" $root.Values.tokensSecret }}}
  - {name: tmp, emptyDir: {}}
  {{- if $root.Values.modelClaim }}
  - {name: models, persistentVolumeClaim: {claimName: {{ $root.Values.modelClaim }}}}
  {{- end }}
{{- end }}
