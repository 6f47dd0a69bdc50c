{{/* Pieces of NetworkPolicies. Peers are lists of {podSelector}, {namespaceSelector} or {ipBlock}. */}}

{{/* The pods of some components: dict root, components. */}}
{{- define "tba.peers" -}}
{{- range .components }}
- podSelector:
    matchLabels: {{- include "tba.selector" (dict "root" $.root "component" .) | nindent 6 }}
{{- end }}
{{- end }}

{{/* Address ranges, or any address: a list of ranges. */}}
{{- define "tba.cidrs" -}}
{{- range . | default (list "0.0.0.0/0" "::/0") }}
- ipBlock: {cidr: {{ . | quote }}}
{{- end }}
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

{{- define "tba.egressStore" -}}
{{- $network := .Values.networkPolicy.store -}}
{{- if .Values.objectstore.enabled }}
{{- include "tba.egressTo" (dict "root" . "components" (list "objectstore") "port" 9000) }}
{{- else }}
{{- $own := 443 }}
{{- with .Values.store.endpointUrl }}
{{- $own = include "tba.portOf" (dict "url" . "https" 443 "http" 80) }}
{{- end -}}
- to: {{- include "tba.cidrs" $network.cidrs | nindent 4 }}
  ports: {{- include "tba.tcp" ($network.ports | default (list $own)) | nindent 4 }}
{{- end }}
{{- end }}

{{- define "tba.egressRedis" -}}
{{- if .Values.redis.enabled }}
{{- include "tba.egressTo" (dict "root" . "components" (list "redis") "port" 6379) }}
{{- else }}
{{- $port := .Values.redis.external.port }}
{{- with .Values.redis.external.url }}
{{- $port = include "tba.portOf" (dict "url" . "redis" 6379 "rediss" 6379) }}
{{- end -}}
- to: {{- include "tba.cidrs" .Values.networkPolicy.redis.cidrs | nindent 4 }}
  ports: {{- include "tba.tcp" (list $port) | nindent 4 }}
{{- end }}
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

{{/* One policy, which begins with nothing allowed: dict root, component, ingress, egress (texts of lists). */}}
{{- define "tba.networkPolicy" -}}
{{- $own := (index .root.Values .component).networkPolicy | default dict -}}
apiVersion: networking.k8s.io/v1
kind: NetworkPolicy
metadata:
  name: {{ include "tba.fullname" .root }}-{{ .component }}
  labels: {{- include "tba.labels" . | nindent 4 }}
spec:
  podSelector:
    matchLabels: {{- include "tba.selector" . | nindent 6 }}
  policyTypes: [Ingress, Egress]
  ingress: {{- toYaml (concat (.ingress | fromYamlArray) ($own.extraIngress | default list) | default list) | nindent 4 }}
  egress: {{- toYaml (concat (.egress | fromYamlArray) ($own.extraEgress | default list) | default list) | nindent 4 }}
{{- end }}

{{/* Ingress from the pods of some components on a port: dict root, components, port, more (text of further peers). */}}
{{- define "tba.ingressFrom" }}
- from: {{- include "tba.peers" . | nindent 4 }}{{ with .more }}{{ . | nindent 4 }}{{ end }}
  ports: {{- include "tba.tcp" (list .port) | nindent 4 }}
{{- end }}
