{{/* `data` of the ConfigMap of the recipe; the checksum of the pods is made of this and nothing else. */}}
{{- define "tba.recipe" -}}
{{- $text := .Values.recipe -}}
{{- if and $text .Values.recipeName }}
{{- fail (printf "recipe and recipeName %s are both given; remove one of them" .Values.recipeName) }}
{{- end }}
{{- if .Values.recipeName }}
{{- $text = .Files.Get (printf "files/recipes/%s.toml" .Values.recipeName) }}
{{- if not $text }}
{{- $names := list }}
{{- range $path, $_ := .Files.Glob "files/recipes/*.toml" }}
{{- $names = append $names (base $path | trimSuffix ".toml") }}
{{- end }}
{{- fail (printf "recipeName %s is not a recipe of this chart, which has %s; choose one of them, or give a file: --set-file recipe=mine.toml" .Values.recipeName (join ", " $names)) }}
{{- end }}
{{- end }}
{{- if not $text }}
{{- fail "recipe is required: helm install tba charts/tba --set-file recipe=recipes/mine.toml, or recipeName with a recipe of this chart" }}
{{- end }}
{{- if not (contains "=" $text) }}
{{- fail (printf "recipe is %q, which is not TOML; for the name of a file: --set-file recipe=FILE" (trunc 80 $text)) }}
{{- end -}}
{{ toYaml (dict "recipe.toml" $text) }}
{{- end }}
