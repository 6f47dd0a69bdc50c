{{/* Pieces of NetworkPolicies. Peers are lists of {podSelector}, {namespaceSelector} or {ipBlock}. */}}

{{/* The pods of some components: dict root, components. */}}
{{- define "tba.peers" -}}
{{- range .components }}
- podSelector:
    matchLabels: {{- include "tba.selector" (dict "root" $.root "component" .) | nindent 6 }}
{{- end }}
{{- end }}

{{/* Peers, or whatever is anywhere: a list of peers. Plug-ins differ in whether a range of addresses means pods too. */}}
{{- define "tba.anywhereOr" -}}
{{- $anywhere := list (dict "ipBlock" (dict "cidr" "0.0.0.0/0")) (dict "ipBlock" (dict "cidr" "::/0")) (dict "namespaceSelector" dict) -}}
{{ toYaml (. | default $anywhere) }}
{{- end }}

{{/* Egress to something outside of the release: dict target (of networkPolicy), ports. */}}
{{- define "tba.egressOutside" -}}
- to: {{- include "tba.anywhereOr" .target.to | nindent 4 }}
  ports: {{- include "tba.tcp" .ports | nindent 4 }}
{{- end }}

{{- define "tba.tcp" -}}
{{- range . }}
- {port: {{ . | int }}, protocol: TCP}
{{- end }}
{{- end }}

{{/* Egress to the pods of a component on a port: dict root, components, port. */}}
{{- define "tba.egressTo" -}}
- to: {{- include "tba.peers" . | nindent 4 }}
  ports: {{- include "tba.tcp" (list .port) | nindent 4 }}
{{- end }}

{{- define "tba.egressDns" -}}
{{- $anyPod := list (dict "namespaceSelector" dict) (dict "ipBlock" (dict "cidr" "169.254.20.10/32")) -}}
- to: {{- toYaml (.Values.networkPolicy.dns.to | default $anyPod) | nindent 4 }}
  ports:
    {{- range .Values.networkPolicy.dns.ports }}
    - {port: {{ . | int }}, protocol: UDP}
    - {port: {{ . | int }}, protocol: TCP}
    {{- end }}
{{- end }}

{{- define "tba.storePort" -}}
{{- if .Values.store.endpointUrl }}{{ include "tba.portOf" (dict "url" .Values.store.endpointUrl "https" 443 "http" 80) }}{{ else }}443{{ end }}
{{- end }}

{{- define "tba.egressStore" -}}
{{- if .Values.objectstore.enabled }}
{{- include "tba.egressTo" (dict "root" . "components" (list "objectstore") "port" 9000) }}
{{- else }}
{{- include "tba.egressOutside" (dict "target" .Values.networkPolicy.store "ports" (list (include "tba.storePort" .))) }}
{{- include "tba.egressPodIdentity" . }}
{{- end }}
{{- end }}

{{/* Where pods without keys of the store get those of their service account. */}}
{{- define "tba.egressPodIdentity" -}}
{{- $identity := .Values.networkPolicy.podIdentity }}
{{- if and (not .Values.store.credentialsSecret) $identity.to }}
- to: {{- toYaml $identity.to | nindent 4 }}
  ports: {{- include "tba.tcp" $identity.ports | nindent 4 }}
{{- end }}
{{- end }}

{{- define "tba.redisPort" -}}
{{- $port := .Values.redis.external.port }}
{{- with .Values.redis.external.url }}
{{- $port = include "tba.portOf" (dict "url" . "redis" 6379 "rediss" 6379) }}
{{- end -}}
{{ $port }}
{{- end }}

{{- define "tba.egressRedis" -}}
{{- if .Values.redis.enabled }}
{{- include "tba.egressTo" (dict "root" . "components" (list "redis") "port" 6379) }}
{{- else }}
{{- include "tba.egressOutside" (dict "target" .Values.networkPolicy.redis "ports" (list (include "tba.redisPort" .))) }}
{{- end }}
{{- end }}

{{/* Ports of the server in which searchers sample. */}}
{{- define "tba.serverPorts" -}}
{{- $own := include "tba.portOf" (dict "url" .Values.searcher.openai.url "https" 443 "http" 80) -}}
{{- toYaml (.Values.networkPolicy.openai.ports | default (list $own)) }}
{{- end }}

{{/* Egress to the services of the run: those of this release, or where the URLs lead: dict root, component, url, port. */}}
{{- define "tba.egressService" -}}
{{- if include "tba.has" . }}
{{- include "tba.egressTo" (dict "root" .root "components" (list .component) "port" .port) }}
{{- else -}}
{{- $port := include "tba.portOf" (dict "url" .url "https" 443 "http" 80) }}
{{- include "tba.egressOutside" (dict "target" .root.Values.networkPolicy.run "ports" (list $port)) }}
{{- end }}
{{- end }}

{{/* Egress to the Kubernetes API and nothing else: where the values say that it is, else where the cluster says. Its
service and the addresses behind it, since plug-ins differ in which of them they look at. */}}
{{- define "tba.egressKubernetesApi" -}}
{{- $api := .Values.networkPolicy.kubernetesApi -}}
{{- if $api.to -}}
- to: {{- toYaml $api.to | nindent 4 }}
  ports: {{- include "tba.tcp" $api.ports | nindent 4 }}
{{- else }}
{{- $service := lookup "v1" "Service" "default" "kubernetes" }}
{{- $behind := (lookup "v1" "Endpoints" "default" "kubernetes").subsets }}
{{- if not (and $service $behind) }}
{{- fail "the buffer sets the number of searchers through the Kubernetes API, and no cluster was asked where that is; name it in networkPolicy.kubernetesApi.to, a list of peers such as {ipBlock: {cidr: 10.0.0.1/32}} (kubectl get service,endpoints kubernetes), or set scaling.backend to none" }}
{{- end }}
{{- range $service.spec.clusterIPs | default (list $service.spec.clusterIP) }}
- to: [{ipBlock: {cidr: {{ include "tba.oneAddress" . }}}}]
  ports: [{port: 443, protocol: TCP}]
{{- end }}
{{- range $behind }}
- to:
    {{- range .addresses }}
    - ipBlock: {cidr: {{ include "tba.oneAddress" .ip }}}
    {{- end }}
  ports:
    {{- range .ports }}
    - {port: {{ int .port }}, protocol: TCP}
    {{- end }}
{{- end }}
{{- end }}
{{- end }}

{{/* The range that is one address. */}}
{{- define "tba.oneAddress" -}}
{{ . }}/{{ contains ":" . | ternary 128 32 }}
{{- end }}

{{/* Who may read metrics. */}}
{{- define "tba.metricsPeers" -}}
{{- $network := .Values.networkPolicy -}}
{{- if $network.metricsFrom }}
{{ toYaml $network.metricsFrom }}
{{- else if .Values.serviceMonitor.enabled }}
- namespaceSelector: {}
{{- end }}
{{- end }}

{{/* Who may reach the buffer for those outside of the cluster. */}}
{{- define "tba.routesPeers" -}}
{{- $network := .Values.networkPolicy -}}
{{- if $network.routesFrom }}
{{ toYaml $network.routesFrom }}
{{- else if .Values.buffer.ingress.enabled }}
- namespaceSelector: {}
{{- end }}
{{- end }}

{{/* Peers beside those of the release: searchers of other releases, and, for services, whoever reads metrics: text of peers. */}}
{{- define "tba.otherSearchers" -}}
{{- with .Values.networkPolicy.searchersFrom }}
{{ toYaml . }}
{{- end }}
{{- end }}

{{/* One policy, which begins with nothing allowed: dict root, component, ingress, egress (texts of lists). */}}
{{- define "tba.networkPolicy" -}}
{{- $more := .root.Values.networkPolicy -}}
apiVersion: networking.k8s.io/v1
kind: NetworkPolicy
metadata:
  name: {{ include "tba.fullname" .root }}-{{ .component }}
  namespace: {{ .root.Release.Namespace }}
  labels: {{- include "tba.labels" . | nindent 4 }}
spec:
  podSelector:
    matchLabels: {{- include "tba.selector" . | nindent 6 }}
  policyTypes: [Ingress, Egress]
  ingress: {{- toYaml (concat (.ingress | fromYamlArray) (get $more.extraIngress .component | default list) | default list) | nindent 4 }}
  egress: {{- toYaml (concat (.egress | fromYamlArray) (get $more.extraEgress .component | default list) | default list) | nindent 4 }}
{{- end }}

{{/* Ingress from the pods of some components on a port: dict root, components, port, more (text of further peers). */}}
{{- define "tba.ingressFrom" }}
- from: {{- include "tba.peers" . | nindent 4 }}{{ with .more }}{{ . | nindent 4 }}{{ end }}
  ports: {{- include "tba.tcp" (list .port) | nindent 4 }}
{{- end }}
