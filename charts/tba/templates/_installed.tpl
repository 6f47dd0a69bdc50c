{{/* What Kubernetes never changes, and where the run's truth lies, compared with what is installed: refused before anything
is touched. Where no cluster is asked (`helm template`, Argo CD) there is nothing to compare with. */}}
{{- define "tba.validate.installed" -}}
{{- $name := include "tba.fullname" . }}
{{- $namespace := .Release.Namespace }}
{{- if .Release.IsUpgrade }}
{{- range (lookup "v1" "ConfigMap" $namespace "").items }}
{{- $labels := .metadata.labels | default dict }}
{{- if and (eq (get $labels "app.kubernetes.io/component") "recipe") (eq (get $labels "app.kubernetes.io/instance") $.Release.Name) (ne .metadata.name (printf "%s-recipe" $name)) }}
{{- fail (printf "this release's objects and claims are called %s, and the values would call them %s, which would begin with empty claims; set fullnameOverride to the first" (trimSuffix "-recipe" .metadata.name) $name) }}
{{- end }}
{{- end }}
{{- end }}
{{- range $part := list "redis" "objectstore" }}
{{- $old := lookup "apps/v1" "StatefulSet" $namespace (printf "%s-%s" $name $part) }}
{{- $is := include "tba.has" (dict "root" $ "component" $part) }}
{{- if and $old (not $is) $.Release.IsUpgrade }}
{{- fail (printf "%s.enabled is false, and the run of this release lives on the claim of %s-%s; set it back to true, or to move: helm uninstall (claims stay), copy what they hold, helm install" $part $name $part) }}
{{- end }}
{{- if and $old $is }}
{{- $claim := index $old.spec.volumeClaimTemplates 0 }}
{{- $new := index $.Values $part "persistence" }}
{{- $size := $claim.spec.resources.requests.storage }}
{{- if ne (include "tba.bytes" $size) (include "tba.bytes" $new.size) }}
{{- fail (printf "%s.persistence.size is %v and the claim was made with %v, which Kubernetes does not let Helm change; set it back and grow the claim itself: kubectl patch pvc data-%s-%s-0 (docs/deploy.md)" $part $new.size $size $name $part) }}
{{- end }}
{{- $class := $claim.spec.storageClassName | default "" }}
{{- if ne $class $new.storageClass }}
{{- fail (printf "%s.persistence.storageClass is %q and the claim was made with %q, which Kubernetes does not let anybody change; set it back" $part $new.storageClass $class) }}
{{- end }}
{{- end }}
{{- end }}
{{- end }}

{{/* A quantity as a number, so that 1Gi and 1024Mi are the same. */}}
{{- define "tba.bytes" -}}
{{- $text := toString . -}}
{{- $factors := dict "k" 1e3 "M" 1e6 "G" 1e9 "T" 1e12 "P" 1e15 "Ki" 1024.0 "Mi" 1048576.0 "Gi" 1073741824.0 "Ti" 1099511627776.0 "Pi" 1125899906842624.0 -}}
{{- $unit := regexFind "[kKMGTP]i?$" $text -}}
{{ mulf (trimSuffix $unit $text | float64) (get $factors $unit | default 1.0) | printf "%.0f" }}
{{- end }}
