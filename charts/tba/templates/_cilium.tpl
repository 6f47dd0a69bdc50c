{{/* Pieces of CiliumNetworkPolicies. */}}

{{- define "tba.cilium.ports" -}}
- ports:
    {{- range . }}
    - {port: {{ . | int | quote }}, protocol: TCP}
    {{- end }}
{{- end }}

{{/* DNS servers, on pods or nodes; Cilium reads the answers, by which it knows the addresses of names. */}}
{{- define "tba.cilium.dns" -}}
- toEntities: [cluster]
  toPorts:
    - ports:
        {{- range .Values.networkPolicy.dns.ports }}
        - {port: {{ . | int | quote }}, protocol: ANY}
        {{- end }}
      rules: {dns: [{matchPattern: "*"}]}
{{- end }}

{{/* What a target names for Cilium: dict target, ports. A star makes a pattern. */}}
{{- define "tba.cilium.named" -}}
{{- with .target.hosts }}
- toFQDNs:
    {{- range . }}
    - {{ dict (contains "*" . | ternary "matchPattern" "matchName") . | toJson }}
    {{- end }}
  toPorts: {{- include "tba.cilium.ports" $.ports | nindent 4 }}
{{- end }}
{{- with .target.entities }}
- toEntities: {{ toJson . }}
  toPorts: {{- include "tba.cilium.ports" $.ports | nindent 4 }}
{{- end }}
{{- end }}

{{/* The same, or anywhere where nothing is named: dict target, ports. */}}
{{- define "tba.cilium.outside" -}}
{{- $target := .target }}
{{- if not (or $target.to $target.hosts $target.entities) }}{{ $target = dict "entities" (list "world" "cluster") }}{{ end -}}
{{- include "tba.cilium.named" (dict "target" $target "ports" .ports) }}
{{- end }}
