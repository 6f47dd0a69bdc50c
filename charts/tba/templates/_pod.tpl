{{/* What the pods of all components share. */}}

{{/* `pod` of the values with that of the component merged over it: dict root, component. */}}
{{- define "tba.podValues" -}}
{{- $own := dig "pod" dict (get .root.Values .component | default dict) -}}
{{- $empty := dict "labels" dict "annotations" dict "podSecurityContext" dict "securityContext" dict -}}
{{- $merged := mergeOverwrite $empty (deepCopy .root.Values.pod) (deepCopy $own) -}}
{{- if $own.tmpVolume }}{{ $_ := set $merged "tmpVolume" $own.tmpVolume }}{{ end -}}
{{ toYaml $merged }}
{{- end }}

{{/* Labels and annotations of a pod: dict root, component. */}}
{{- define "tba.podMetadata" -}}
{{- $pod := include "tba.podValues" . | fromYaml -}}
labels: {{- include "tba.podLabels" . | nindent 2 }}
{{- $annotations := dict }}
{{- if has .component (list "buffer" "reward" "searcher" "trainer" "setup") }}
{{- $_ := set $annotations "checksum/recipe" (include "tba.recipe" .root | sha256sum) }}
{{- end }}
{{- with merge $annotations $pod.annotations }}
annotations: {{- toYaml . | nindent 2 }}
{{- end }}
{{- end }}

{{/* Who a pod is and where it may run: dict root, component, uid (optional), token (optional: mount that of the API). */}}
{{- define "tba.podBase" -}}
{{- $root := .root -}}
{{- $pod := include "tba.podValues" . | fromYaml -}}
{{- $uid := .uid | default 65532 | int -}}
{{- $identity := dict "runAsNonRoot" true "runAsUser" $uid "runAsGroup" $uid "fsGroup" $uid "fsGroupChangePolicy" "OnRootMismatch" "seccompProfile" (dict "type" "RuntimeDefault") -}}
serviceAccountName: {{ include "tba.serviceAccountName" . }}
automountServiceAccountToken: {{ .token | default false }}
enableServiceLinks: false
{{- with $root.Values.global.imagePullSecrets }}
imagePullSecrets:
  {{- range . }}
  - name: {{ . }}
  {{- end }}
{{- end }}
securityContext: {{- toYaml (mergeOverwrite $identity $pod.podSecurityContext) | nindent 2 }}
terminationGracePeriodSeconds: {{ include "tba.graceS" . }}
{{- with $pod.nodeSelector }}
nodeSelector: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with $pod.tolerations }}
tolerations: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with $pod.affinity | default .affinity }}
affinity: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with $pod.topologySpreadConstraints }}
topologySpreadConstraints:
  {{- range . }}
  {{- $selector := hasKey . "labelSelector" | ternary dict (dict "labelSelector" (dict "matchLabels" (include "tba.selector" $ | fromYaml))) }}
  - {{ toYaml (merge (dict) . $selector) | nindent 4 | trim }}
  {{- end }}
{{- end }}
{{- with $pod.priorityClassName | default (include "tba.ownPriorityClass" .) }}
priorityClassName: {{ . }}
{{- end }}
{{- with $pod.schedulerName }}
schedulerName: {{ . }}
{{- end }}
{{- with $pod.resourceClaims }}
resourceClaims: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with $pod.runtimeClassName }}
runtimeClassName: {{ . }}
{{- end }}
{{- end }}

{{/* Seconds from SIGTERM to SIGKILL: dict root, component. */}}
{{- define "tba.graceS" -}}
{{- $fixed := dict "buffer" 30 "reward" 30 "setup" 30 "redis" 60 "objectstore" 30 "test" 10 "stop" 5 -}}
{{ get $fixed .component | default (get .root.Values .component | default dict).terminationGracePeriodSeconds | int }}
{{- end }}

{{/* Containers beside the component's own: dict root, component. */}}
{{- define "tba.sidecars" -}}
{{- with (include "tba.podValues" . | fromYaml).extraContainers }}
{{- toYaml . }}
{{- end }}
{{- end }}

{{/* The PriorityClass that the chart makes for a component, if any: dict root, component. Its name is of the whole cluster, and has
the value in it (-1), which nobody may change in a class. */}}
{{- define "tba.ownPriorityClass" -}}
{{- $named := (include "tba.podValues" . | fromYaml).priorityClassName -}}
{{- if and (eq .component "searcher") .root.Values.searcher.priorityClass.create (not $named) -}}
searcher-1.{{ .root.Release.Namespace }}.{{ include "tba.fullname" .root }}
{{- end }}
{{- end }}

{{/* Affinity by which the pods of a component share no node where there is another: dict root, component. */}}
{{- define "tba.apart" -}}
podAntiAffinity:
  preferredDuringSchedulingIgnoredDuringExecution:
    - weight: 100
      podAffinityTerm:
        topologyKey: kubernetes.io/hostname
        labelSelector:
          matchLabels: {{- include "tba.selector" . | nindent 12 }}
{{- end }}

{{/* What every container has: dict root, component, image (the component whose it is). */}}
{{- define "tba.containerBase" -}}
{{- $pod := include "tba.podValues" . | fromYaml -}}
{{- $fence := dict "readOnlyRootFilesystem" true "allowPrivilegeEscalation" false "capabilities" (dict "drop" (list "ALL")) -}}
image: {{ include "tba.image" . | quote }}
imagePullPolicy: {{ and .root.Values.image.present (ne .image "redis") | ternary "Never" .root.Values.image.pullPolicy }}
securityContext: {{- toYaml (mergeOverwrite $fence $pod.securityContext) | nindent 2 }}
# the last lines of the log become the reason in the status of the pod
terminationMessagePolicy: FallbackToLogsOnError
{{- end }}

{{/* A quantity as text: server-side apply refuses a number (`nvidia.com/gpu: 1`). */}}
{{- define "tba.quantity" -}}
{{- if and (kindIs "float64" .) (eq . (floor .)) }}{{ int64 . }}{{ else }}{{ . }}{{ end -}}
{{- end }}

{{/* Requests and limits, with GPUs in them: dict resources, gpu. */}}
{{- define "tba.resources" -}}
{{- $resources := deepCopy .resources -}}
{{- if and .gpu (gt (int .gpu.count) 0) }}
{{- $gpus := dict .gpu.resource (int .gpu.count) }}
{{- $resources = mergeOverwrite $resources (dict "limits" (merge $gpus ($resources.limits | default dict))) }}
{{- end -}}
{{- range $kind := list "requests" "limits" }}
{{- $texts := dict -}}
{{- range $name, $quantity := get $resources $kind | default dict }}
{{- $_ := set $texts $name (include "tba.quantity" $quantity) }}
{{- end }}
{{- if $texts }}{{ $_ := set $resources $kind $texts }}{{ end }}
{{- end }}
{{- toYaml $resources }}
{{- end }}

{{/* A probe over HTTP: dict root, path, and its numbers. */}}
{{- define "tba.httpProbe" -}}
{{- $get := dict "path" .path "port" "http" "scheme" (include "tba.scheme" .root | upper) -}}
{{- toYaml (mergeOverwrite (dict "httpGet" $get) .numbers) }}
{{- end }}

{{/* The three probes of a service of tba: dict root, component. Liveness asks nothing but the process itself. */}}
{{- define "tba.serviceProbes" -}}
{{- $startup := mergeOverwrite (dict "periodSeconds" 2 "timeoutSeconds" 5 "failureThreshold" 300) ((index .root.Values .component).startupProbe | default dict) -}}
startupProbe: {{- include "tba.httpProbe" (dict "root" .root "path" "/readyz" "numbers" $startup) | nindent 2 }}
readinessProbe: {{- include "tba.httpProbe" (dict "root" .root "path" "/readyz" "numbers" (dict "periodSeconds" 5 "timeoutSeconds" 5 "failureThreshold" 3)) | nindent 2 }}
livenessProbe: {{- include "tba.httpProbe" (dict "root" .root "path" "/livez" "numbers" (dict "periodSeconds" 10 "timeoutSeconds" 10 "failureThreshold" 6)) | nindent 2 }}
{{- end }}
