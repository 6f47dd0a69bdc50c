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
{{- range $part := list "setup" "stop" "redis" "objectstore" }}{{ if (index $.Values $part).enabled }} {{ $part }}{{ end }}{{ end }}
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
labels: {{- merge (include "tba.labels" . | fromYaml) ($own.labels | default dict) | toYaml | nindent 2 }}
{{- with merge (dict) ($own.annotations | default dict) (.annotations | default dict) }}
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

{{/* The name of an image: dict root, image (the component whose it is). */}}
{{- define "tba.image" -}}
{{- $root := .root -}}
{{- $foreign := eq .image "redis" -}}
{{- $own := (index $root.Values .image).image | default dict -}}
{{- $repository := $own.repository | default (printf "tba-%s" .image) -}}
{{- $registry := $root.Values.global.imageRegistry | default ($foreign | ternary "" $root.Values.image.registry) -}}
{{- if not (or $foreign $registry $root.Values.image.present) }}
{{- fail (printf "image.registry is empty, and nobody publishes %s: push the images to a registry of yours (`make images images-push REGISTRY=HOST/PATH/`) and set image.registry to HOST/PATH, or bring them onto every node (`kind load docker-image`) and set image.present to true" $repository) }}
{{- end -}}
{{- $tag := $own.tag | default ($foreign | ternary "" $root.Values.image.tag) | default $root.Chart.AppVersion -}}
{{- if eq (toString $tag) "latest" }}
{{- fail (printf "the tag of image %s is latest, which may be a different image every day and on every node; name a version" $repository) }}
{{- end -}}
{{ with $registry }}{{ trimSuffix "/" . }}/{{ end }}{{ $repository }}:{{ $tag }}
{{- end }}

{{- define "tba.serviceAccountName" -}}
{{- $own := get .root.Values.serviceAccounts.names .component -}}
{{- if $own }}{{ $own }}
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
