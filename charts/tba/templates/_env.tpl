{{/* The environment of a container: maps from name to {value} or {valueFrom}, which are merged, then made a list. */}}

{{/* What every container of tba knows: dict root, component. */}}
{{- define "tba.env.chart" -}}
{{- $root := .root -}}
TBA_BUFFER__HOST: {value: "::"} # and IPv4
TBA_BUFFER__PORT: {value: "8700"}
TBA_BUFFER__URL: {value: {{ include "tba.bufferUrl" $root }}}
TBA_REWARD__HOST: {value: "::"}
TBA_REWARD__PORT: {value: "8701"}
TBA_REWARD__URL: {value: {{ include "tba.rewardUrl" $root }}}
TBA_STORE__URL: {value: {{ $root.Values.store.url | quote }}}
TBA_STORE__REGION: {value: {{ $root.Values.store.region | quote }}}
{{- with include "tba.storeEndpoint" $root }}
TBA_STORE__ENDPOINT_URL: {value: {{ . | quote }}}
{{- end }}
{{- if $root.Values.store.caSecret }}
TBA_STORE__CA_FILE: {value: /etc/tba-store-ca/ca.crt}
{{- end }}
{{- with include "tba.storeSecret" . }}
{{- include "tba.storeKeys" (dict "root" $root "secret" . "prefix" "AWS") }}
{{- end }}
TBA_AUTH__TOKENS_FILE: {value: /etc/tba-tokens/tokens.json}
TBA_TRACKING__METRICS_PATH: {value: /tmp/metrics.jsonl}
{{- if eq (int $root.Values.searcher.replicas) 0 }}
# the run is offline, for all who read the recipe
TBA_SEARCHER__NUM_SEARCHERS: {value: "0"}
{{- end }}
{{- with $root.Values.searcher.openai.url }}
# the buffer starts no second searcher for one server
TBA_SEARCHER__ENGINE: {value: openai}
TBA_SEARCHER__OPENAI__URL: {value: {{ . | quote }}}
{{- end }}
{{- if include "tba.caSecret" . }}
TBA_TLS__CA_FILE: {value: /etc/tba-ca/ca.crt}
{{- end }}
{{- include (printf "tba.env.%s" .component) $root }}
{{- end }}

{{/* Whether the buffer service sets the number of searchers; an offline run has none. */}}
{{- define "tba.scales" -}}
{{- if and (eq .Values.scaling.backend "kubernetes") (gt (int .Values.searcher.replicas) 0) }}yes{{ end }}
{{- end }}

{{/* Secret with the store keys that a component sees: who writes has those that may write, who only reads models and
weight versions the others. Scorers run what models wrote: without models the reward service sees none. */}}
{{- define "tba.storeSecret" -}}
{{- if has .component (list "buffer" "trainer" "setup") }}{{ .root.Values.store.credentialsSecret }}
{{- else if include "tba.holdsModels" . }}{{ .root.Values.store.readOnlyCredentialsSecret }}
{{- end }}
{{- end }}

{{/* PREFIX_ACCESS_KEY_ID and PREFIX_SECRET_ACCESS_KEY: dict root, secret, prefix. */}}
{{- define "tba.storeKeys" }}
{{ .prefix }}_ACCESS_KEY_ID: {valueFrom: {secretKeyRef: {name: {{ .secret }}, key: AWS_ACCESS_KEY_ID}}}
{{ .prefix }}_SECRET_ACCESS_KEY: {valueFrom: {secretKeyRef: {name: {{ .secret }}, key: AWS_SECRET_ACCESS_KEY}}}
{{- end }}

{{/* The two pairs that the bundled store checks. */}}
{{- define "tba.env.objectstore" -}}
{{- include "tba.storeKeys" (dict "root" . "secret" .Values.store.credentialsSecret "prefix" "READ_WRITE") }}
{{- include "tba.storeKeys" (dict "root" . "secret" .Values.store.readOnlyCredentialsSecret "prefix" "READ_ONLY") }}
{{- end }}

{{- define "tba.env.tlsServer" }}
{{- if .Values.tls.existingSecret }}
TBA_TLS__CERT_FILE: {value: /etc/tba-tls/tls.crt}
TBA_TLS__KEY_FILE: {value: /etc/tba-tls/tls.key}
{{- end }}
{{- end }}

{{- define "tba.env.buffer" }}
{{- if .Values.redis.external.urlSecret }}
TBA_BUFFER__REDIS_URL: {valueFrom: {secretKeyRef: {name: {{ .Values.redis.external.urlSecret }}, key: redis-url}}}
{{- else }}
TBA_BUFFER__REDIS_URL: {value: {{ include "tba.redisUrl" . | quote }}}
{{- end }}
{{- if .Values.redis.auth.existingSecret }}
TBA_BUFFER__REDIS_PASSWORD_FILE: {value: /etc/tba-redis/redis-password}
{{- end }}
{{- if include "tba.scales" . }}
TBA_SCALING__BACKEND: {value: kubernetes}
TBA_SCALING__DEPLOYMENT: {value: {{ include "tba.fullname" . }}-searcher}
TBA_SCALING__MAX_SEARCHERS: {value: {{ .Values.scaling.maxSearchers | int | quote }}}
TBA_SCALING__SCALE_DOWN_ON_RUN_END: {value: {{ .Values.scaling.scaleDownOnRunEnd | quote }}}
TBA_SCALING__NUM_SEARCHERS: {value: {{ .Values.searcher.replicas | int | quote }}}
{{- else }}
# whatever the recipe says: here nobody but KEDA or `helm upgrade` sets the number
TBA_SCALING__BACKEND: {value: none}
{{- end }}
{{- include "tba.env.tlsServer" . }}
{{- end }}

{{- define "tba.env.reward" }}
{{- include "tba.env.tlsServer" . }}
{{- end }}

{{- define "tba.env.searcher" }}
TBA_SEARCHER__ON_RUN_END: {value: wait}
TBA_SEARCHER__DRAIN_S: {value: {{ .Values.searcher.drainS | int | quote }}}
{{- if .Values.searcher.weightCache.volume }}
TBA_STORE__CACHE_FOLDER: {value: /weight-cache}
TBA_STORE__CACHE_BYTES: {value: {{ .Values.searcher.weightCache.maxBytes | int64 | quote }}}
{{- end }}
{{- with .Values.searcher.openai }}
{{- if .url }}
TBA_SEARCHER__OPENAI__WEIGHTS_FOLDER: {value: /openai-weights}
{{- with .weights.pathAtServer }}
TBA_SEARCHER__OPENAI__WEIGHTS_FOLDER_AT_SERVER: {value: {{ . | quote }}}
{{- end }}
{{- if .token.existingSecret }}
TBA_SEARCHER__OPENAI__TOKEN_ENV: {value: OPENAI_TOKEN}
OPENAI_TOKEN: {valueFrom: {secretKeyRef: {name: {{ .token.existingSecret }}, key: token}}}
{{- end }}
{{- end }}
{{- end }}
{{- end }}

{{- define "tba.env.trainer" }}
TBA_LOCAL__STOP_TIMEOUT_S: {value: {{ include "tba.trainer.stopTimeoutS" . | quote }}}
{{- if gt (int .Values.trainer.nodes) 1 }}
# names the Job, whose first pod the others look for
TRAINER_JOB: {valueFrom: {fieldRef: {fieldPath: "metadata.labels['job-name']"}}}
{{- else }}
TRAINER_ALIVE_FILE: {value: /tmp/alive}
{{- end }}
{{- end }}

{{- define "tba.env.test" }}
{{- end }}

{{- define "tba.env.setup" }}
{{- if .Values.setup.prepare }}
HF_HUB_OFFLINE: {value: "0"}
HF_HOME: {value: /tmp/huggingface}
{{- with .Values.setup.hubToken.existingSecret }}
HF_TOKEN: {valueFrom: {secretKeyRef: {name: {{ . }}, key: token}}}
{{- end }}
{{- end }}
{{- end }}

{{/* The list: what the chart sets, in the order of names, then the user's own, each name once: dict root, component. */}}
{{- define "tba.env" -}}
{{- $chart := include "tba.env.chart" . | fromYaml -}}
{{- if hasKey $chart "Error" }}{{ fail (printf "environment of %s: %s" .component $chart.Error) }}{{ end -}}
{{- include "tba.envList" (dict "chart" $chart "lists" (list .root.Values.extraEnv (dig "extraEnv" list (get .root.Values .component | default dict)))) -}}
{{- end }}

{{/* dict chart: a map; lists: lists of which later ones win. */}}
{{- define "tba.envList" -}}
{{- $own := dict -}}
{{- $order := list -}}
{{- range $list := .lists }}
{{- $seen := dict }}
{{- range $entry := $list }}
{{- if hasKey $seen $entry.name }}{{ fail (printf "extraEnv has %s twice; remove one of them" $entry.name) }}{{ end }}
{{- if and (hasKey $entry "value") (hasKey $entry "valueFrom") }}{{ fail (printf "extraEnv gives %s by value and by valueFrom; remove one of them" $entry.name) }}{{ end }}
{{- $_ := set $seen $entry.name true }}
{{- $_ := set $own $entry.name $entry }}
{{- $order = append $order $entry.name }}
{{- end }}
{{- end -}}
{{- $result := list -}}
{{- range $name, $entry := .chart }}
{{- if not (hasKey $own $name) }}
{{- $result = append $result (merge (dict "name" $name) $entry) }}
{{- end }}
{{- end -}}
{{- range $name := uniq $order }}
{{- $result = append $result (index $own $name) }}
{{- end -}}
{{- toYaml $result -}}
{{- end }}
