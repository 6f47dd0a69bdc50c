{{/* Names, labels, images. Names are cut so that every object, pod and label stays within 63 characters. */}}

{{- define "tba.fullname" -}}
{{- $name := empty .Values.nameOverride | ternary .Release.Name (printf "%s-%s" .Release.Name .Values.nameOverride) -}}
{{ .Values.fullnameOverride | default $name | trunc 40 | trimSuffix "-" }}
{{- end }}

{{/* The components of this release, with spaces between them. */}}
{{- define "tba.components" -}}
{{- if .Values.searchersOnly.enabled -}}
searcher
{{- else -}}
buffer reward searcher trainer test
{{- range $part := list "setup" "check" "stop" "redis" "objectstore" }}{{ if (index $.Values $part).enabled }} {{ $part }}{{ end }}{{ end }}
{{- end -}}
{{- end }}

{{/* Whether this release installs a component: dict root, component. */}}
{{- define "tba.has" -}}
{{- if has .component (include "tba.components" .root | splitList " ") }}yes{{ end }}
{{- end }}

{{/* Labels of an object: dict root, component. */}}
{{- define "tba.labels" -}}
{{- $own := dict "app.kubernetes.io/managed-by" .root.Release.Service "app.kubernetes.io/version" .root.Chart.AppVersion -}}
{{ toYaml (merge (include "tba.selector" . | fromYaml) $own .root.Values.commonLabels) }}
{{- end }}

{{/* Labels and annotations of the workload itself, with its own: dict root, component. */}}
{{- define "tba.workloadMetadata" -}}
{{- $own := index .root.Values .component -}}
labels: {{- merge (include "tba.labels" . | fromYaml) $own.labels | toYaml | nindent 2 }}
{{- with merge (dict) $own.annotations (.annotations | default dict) }}
annotations: {{- toYaml . | nindent 2 }}
{{- end }}
{{- end }}

{{/* What selects the pods of a component: dict root, component. Never changes in the life of a release. */}}
{{- define "tba.selector" -}}
app.kubernetes.io/name: {{ .root.Values.nameOverride | default "tba" }}
app.kubernetes.io/instance: {{ .root.Release.Name }}
app.kubernetes.io/component: {{ .component }}
{{- end }}

{{/* Labels of a pod: without the version, so that a new chart does not restart what is the same. */}}
{{- define "tba.podLabels" -}}
{{- $labels := merge (include "tba.selector" . | fromYaml) .root.Values.commonLabels (include "tba.podValues" . | fromYaml).labels -}}
{{ toYaml $labels }}
{{- end }}

{{/* The name of an image: dict root, image, foreign (not of tba). */}}
{{- define "tba.image" -}}
{{- $root := .root -}}
{{- $own := .image -}}
{{- $registry := $root.Values.global.imageRegistry | default $own.registry | default (.foreign | ternary "" $root.Values.image.registry) -}}
{{- if not (or .foreign $registry (contains "/" $own.repository) $root.Values.image.present) }}
{{- fail (printf "image.registry is empty, and nobody publishes %s: push the images to a registry of yours (`make images images-push REGISTRY=HOST/PATH/`) and set image.registry to HOST/PATH, or bring them onto every node (`kind load docker-image`) and set image.present to true" $own.repository) }}
{{- end -}}
{{- $tag := $own.tag | default (.foreign | ternary "" $root.Values.image.tag) | default $root.Chart.AppVersion -}}
{{- if and (eq (toString $tag) "latest") (not $own.digest) }}
{{- fail (printf "the tag of image %s is latest, which may be a different image every day and on every node; name a version" $own.repository) }}
{{- end -}}
{{ with $registry }}{{ trimSuffix "/" . }}/{{ end }}{{ $own.repository }}{{ if $own.digest }}@{{ $own.digest }}{{ else }}:{{ $tag }}{{ end }}
{{- end }}

{{- define "tba.serviceAccountName" -}}
{{- $account := (index .root.Values .component).serviceAccount -}}
{{- if $account.name }}{{ $account.name }}
{{- else if .root.Values.serviceAccounts.create }}{{ include "tba.fullname" .root }}-{{ .component }}
{{- else }}default
{{- end }}
{{- end }}

{{/* The port of a URL, or what its scheme means: dict url, https, http. */}}
{{- define "tba.portOf" -}}
{{- $parsed := urlParse .url -}}
{{- $port := regexFind ":[0-9]+$" $parsed.host | trimPrefix ":" -}}
{{ $port | default (index . $parsed.scheme) }}
{{- end }}
