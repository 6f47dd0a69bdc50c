{{/* Values that could not work, each refused with a sentence: what, which value, what to do. */}}
{{- define "tba.validate" -}}
{{- include "tba.validate.needed" . }}
{{- include "tba.validate.searchersOnly" . }}
{{- include "tba.validate.store" . }}
{{- include "tba.validate.redis" . }}
{{- include "tba.validate.redisUnused" . }}
{{- include "tba.validate.scaling" . }}
{{- include "tba.validate.trainer" . }}
{{- include "tba.validate.pods" . }}
{{- include "tba.validate.routes" . }}
{{- include "tba.validate.ranks" . }}
{{- include "tba.validate.openai" . }}
{{- include "tba.validate.installed" . }}
{{- end }}

{{- define "tba.validate.needed" -}}
{{- $name := include "tba.fullname" . }}
{{- if not (regexMatch "^[a-z]([-a-z0-9]*[a-z0-9])?$" $name) }}
{{- fail (printf "objects would be called %q, and a Service has small letters, digits and dashes and begins with a letter; name the release so, or set fullnameOverride" $name) }}
{{- end }}
{{- if not .Values.auth.existingSecret }}
{{- fail "auth.existingSecret is required: the name of a Secret with a file of tokens for each role; `deploy/make-secrets --kubernetes NAMESPACE | kubectl apply -f -` makes one called tba-tokens" }}
{{- end }}
{{- end }}

{{- define "tba.validate.searchersOnly" -}}
{{- $only := .Values.searchersOnly }}
{{- range $key := list "bufferUrl" "rewardUrl" }}
{{- $url := get $only $key }}
{{- if and $only.enabled (not (regexMatch "^https?://[^/]+$" $url)) }}
{{- fail (printf "searchersOnly.%s is %q; give the URL of that service of the run, http://HOST:PORT or https://HOST:PORT" $key $url) }}
{{- end }}
{{- if and $url (not $only.enabled) }}
{{- fail (printf "searchersOnly.%s %s is given and searchersOnly.enabled is false: this release would bring a run of its own; set it to true, or remove the URL" $key $url) }}
{{- end }}
{{- end }}
{{- if $only.enabled }}
{{- if eq .Values.scaling.backend "kubernetes" }}
{{- fail "searchersOnly.enabled installs no buffer service, and scaling.backend kubernetes leaves the number of searchers to it; set scaling.backend to none" }}
{{- end }}
{{- if and (eq .Values.scaling.backend "keda") (not .Values.scaling.keda.query) }}
{{- fail "scaling.keda.query is empty, and the chart's own query is for the buffer service of this release, which searchersOnly.enabled does not install; give a query for that of the run" }}
{{- end }}
{{- if .Values.tls.existingSecret }}
{{- fail (printf "tls.existingSecret %s is for buffer and reward service, which searchersOnly.enabled does not install; give the authorities of the run's in searchersOnly.caSecret" .Values.tls.existingSecret) }}
{{- end }}
{{- range $part := list "objectstore" "serviceMonitor" "prometheusRule" "dashboards" }}
{{- if (index $.Values $part).enabled }}
{{- fail (printf "%s.enabled brings another part, and searchersOnly.enabled installs searchers alone; turn one of them off" $part) }}
{{- end }}
{{- end }}
{{- end }}
{{- end }}

{{- define "tba.validate.store" -}}
{{- $store := .Values.store }}
{{- if not (regexMatch "^s3://[^/]" $store.url) }}
{{- fail (printf "store.url is %q; give an s3://BUCKET/PREFIX URL: pods share no folder" $store.url) }}
{{- end }}
{{- if and .Values.objectstore.enabled $store.endpointUrl }}
{{- fail (printf "store.endpointUrl %s names a store and objectstore.enabled brings another one; turn one of them off" $store.endpointUrl) }}
{{- end }}
{{- if and $store.endpointUrl (not (regexMatch "^https?://[^/]+" $store.endpointUrl)) }}
{{- fail (printf "store.endpointUrl is %q; give http://HOST:PORT or https://HOST:PORT" $store.endpointUrl) }}
{{- end }}
{{- if and .Values.objectstore.enabled (or (not $store.credentialsSecret) (not $store.readOnlyCredentialsSecret)) }}
{{- fail "objectstore.enabled brings a store that checks two pairs of keys; name their Secrets in store.credentialsSecret and store.readOnlyCredentialsSecret: `deploy/make-secrets --kubernetes NAMESPACE | kubectl apply -f -` makes tba-store and tba-store-read" }}
{{- end }}
{{- if and $store.credentialsSecret (not $store.readOnlyCredentialsSecret) }}
{{- fail (printf "store.credentialsSecret %s is for services that write; name a Secret with keys that only read in store.readOnlyCredentialsSecret, for the searchers, or the same one where your store has no such keys" $store.credentialsSecret) }}
{{- end }}
{{- end }}

{{- define "tba.validate.redis" -}}
{{- $external := .Values.redis.external }}
{{- if and .Values.redis.enabled (or $external.url $external.urlSecret) }}
{{- fail "redis.external names a Redis and redis.enabled brings another one; set redis.enabled to false to use yours" }}
{{- end }}
{{- if and (not .Values.redis.enabled) (not $external.url) (not $external.urlSecret) }}
{{- fail "redis.enabled is false and redis.external names no other; give redis.external.url or redis.external.urlSecret" }}
{{- end }}
{{- if and $external.url $external.urlSecret }}
{{- fail "redis.external.url and redis.external.urlSecret are both given; remove one of them" }}
{{- end }}
{{- if and $external.url (not (regexMatch "^rediss?://[^/]+" $external.url)) }}
{{- fail (printf "redis.external.url is %q; give redis://HOST:PORT/0, or rediss:// for TLS" $external.url) }}
{{- end }}
{{- if and (include "tba.has" (dict "root" . "component" "redis")) (not .Values.redis.auth.existingSecret) }}
{{- fail "redis.auth.existingSecret is required for the bundled Redis: the name of a Secret with its password; `deploy/make-secrets --kubernetes NAMESPACE | kubectl apply -f -` makes one called tba-redis" }}
{{- end }}
{{- if regexMatch "^rediss?://[^/]*@" $external.url }}
{{- fail "redis.external.url contains a password, which everybody who may read pods would see; put the URL into a Secret and name it in redis.external.urlSecret" }}
{{- end }}
{{- end }}

{{/* What would not be read: dropped in silence, it would be missed too late. */}}
{{- define "tba.validate.redisUnused" -}}
{{- $external := .Values.redis.external }}
{{- if and .Values.redis.enabled $external.caSecret }}
{{- fail (printf "redis.external.caSecret %s is for a Redis of yours, and redis.enabled brings another one; its TLS is redis.tls.existingSecret" $external.caSecret) }}
{{- end }}
{{- if and (not .Values.redis.enabled) .Values.redis.tls.existingSecret }}
{{- fail (printf "redis.tls.existingSecret %s is for the bundled Redis, and redis.enabled is false; give the authorities of yours in redis.external.caSecret" .Values.redis.tls.existingSecret) }}
{{- end }}
{{- if and $external.caSecret (hasPrefix "redis://" $external.url) }}
{{- fail (printf "redis.external.caSecret %s is for TLS, and redis.external.url %s is without; give a rediss:// URL, or remove the Secret" $external.caSecret $external.url) }}
{{- end }}
{{- if and .Values.tls.existingSecret $external.caSecret (ne .Values.tls.existingSecret $external.caSecret) }}
{{- fail (printf "tls.existingSecret %s brings the authorities that the buffer trusts, and redis.external.caSecret %s would not be read; put both into ca.crt of the first, and name it in both" .Values.tls.existingSecret $external.caSecret) }}
{{- end }}
{{- end }}

{{- define "tba.validate.scaling" -}}
{{- $scaling := .Values.scaling }}
{{- $keda := $scaling.keda }}
{{- if eq $scaling.backend "keda" }}
{{- if not $keda.serverAddress }}
{{- fail "scaling.backend is keda and scaling.keda.serverAddress is empty; give the URL of the Prometheus that scrapes the buffer service" }}
{{- end }}
{{- if not (regexMatch "^https?://[^/]" $keda.serverAddress) }}
{{- fail (printf "scaling.keda.serverAddress is %q; give http://HOST:PORT or https://HOST:PORT" $keda.serverAddress) }}
{{- end }}
{{- if eq (int .Values.searcher.replicas) 0 }}
{{- fail "searcher.replicas is 0, which makes an offline run, and scaling.backend keda would start searchers; set scaling.backend to none" }}
{{- end }}
{{- if lt (int $keda.maxReplicas) (int $keda.minReplicas) }}
{{- fail (printf "scaling.keda.maxReplicas %d is below scaling.keda.minReplicas %d; raise it" (int $keda.maxReplicas) (int $keda.minReplicas)) }}
{{- end }}
{{- else if $keda.serverAddress }}
{{- fail (printf "scaling.keda.serverAddress is given and scaling.backend is %s: KEDA and `tba scale` would fight over one number; set scaling.backend to keda, or remove the address" $scaling.backend) }}
{{- end }}
{{- if and (eq $scaling.backend "kubernetes") (gt (int .Values.searcher.replicas) (int $scaling.maxSearchers)) }}
{{- fail (printf "searcher.replicas %d is above scaling.maxSearchers %d; raise that one too" (int .Values.searcher.replicas) (int $scaling.maxSearchers)) }}
{{- end }}
{{- end }}

{{- define "tba.validate.trainer" -}}
{{- $trainer := .Values.trainer }}
{{- $processes := include "tba.trainer.processes" . | int }}
{{- if and (gt (int $trainer.nodes) 1) (semverCompare "<1.22-0" .Capabilities.KubeVersion.Version) }}
{{- fail (printf "trainer.nodes is %d, which needs indexed Jobs of Kubernetes 1.22 or newer, and this is %s; set it to 1" (int $trainer.nodes) .Capabilities.KubeVersion.Version) }}
{{- end }}
{{- if and (gt (int $trainer.gpu.count) 0) (gt $processes (int $trainer.gpu.count)) }}
{{- fail (printf "trainer.processesPerNode %d is more than trainer.gpu.count %d: every process needs a GPU of its own; lower it" $processes (int $trainer.gpu.count)) }}
{{- end }}
{{- if and (gt (int $trainer.gpu.count) 0) (lt $processes (int $trainer.gpu.count)) }}
{{- fail (printf "trainer.processesPerNode %d is less than trainer.gpu.count %d: GPUs would lie idle; lower the count, or leave processesPerNode 0" $processes (int $trainer.gpu.count)) }}
{{- end }}
{{- if and $trainer.fixedJobName .Release.IsUpgrade }}
{{- fail "trainer.fixedJobName is true, and Kubernetes does not let Helm change a Job; it is for Argo CD, which replaces the Job: set it to false" }}
{{- end }}
{{- if lt (int $trainer.terminationGracePeriodSeconds) 20 }}
{{- fail (printf "trainer.terminationGracePeriodSeconds is %d, too short for a checkpoint; give at least 20" (int $trainer.terminationGracePeriodSeconds)) }}
{{- end }}
{{- end }}

{{/* The pattern of a key of [searcher] in a recipe, up to its name: in a table, dotted or in an inline table. Helm reads no TOML. */}}
{{- define "tba.searcherKey" -}}
(?m)^[ \t]*(["']?searcher["']?[ \t]*([.]|=[ \t]*\{([^\n]*[{,])?)[ \t]*)?["']?
{{- end }}

{{/* GPUs of a searcher are for the ranks of vLLM. */}}
{{- define "tba.validate.ranks" -}}
{{- $text := get (include "tba.recipe" . | fromYaml) "recipe.toml" }}
{{- $line := regexFind (printf "%stensor_parallel_size[\"']?[ \t]*=[ \t]*[0-9]+" (include "tba.searcherKey" .)) $text }}
{{- $ranks := regexFind "[0-9]+$" $line | default "1" | int }}
{{- $count := int .Values.searcher.gpu.count }}
{{- if and (gt $ranks 1) .Values.searcher.openai.url }}
{{- fail (printf "searcher.tensor_parallel_size of the recipe is %d and searcher.openai.url is given: the server splits its model itself (vllm serve --tensor-parallel-size), and searchers would refuse to start; set it to 1 in the recipe" $ranks) }}
{{- end }}
{{- if and (gt $count 0) (ne $count $ranks) }}
{{- fail (printf "searcher.gpu.count is %d and searcher.tensor_parallel_size of the recipe is %d: a searcher needs a GPU for each rank and uses no other; set both to the same number, or raise searcher.replicas instead" $count $ranks) }}
{{- end }}
{{- if and (gt $ranks 1) (not .Values.searcher.shm.sizeLimit) }}
{{- fail (printf "searcher.tensor_parallel_size of the recipe is %d and searcher.shm.sizeLimit is empty: ranks talk through /dev/shm, and 64 MiB are too little; give 1Gi or more" $ranks) }}
{{- end }}
{{- end }}

{{/* A server loads the weights of one searcher; its GPUs are its own. */}}
{{- define "tba.validate.openai" -}}
{{- $searcher := .Values.searcher }}
{{- $openai := $searcher.openai }}
{{- $text := get (include "tba.recipe" . | fromYaml) "recipe.toml" }}
{{- if $openai.url }}
{{- if or (not (regexMatch "^https?://([^][/@:?#\\s]+|\\[[0-9A-Fa-f:.]+\\])(:[0-9]{1,5})?(/[^?#\\s]*)?$" $openai.url)) (regexMatch "/v1/?$" $openai.url) }}
{{- /* a password in it must not be shown */}}
{{- fail (printf "searcher.openai.url is %q, or more than that; give the address of the server without /v1, user and options, http://HOST:PORT or https://HOST:PORT" (regexReplaceAll "^(https?://)?([^/?#]*@)?([^?#@]*).*$" $openai.url "${1}${3}")) }}
{{- end }}
{{- if not $openai.weights.volume }}
{{- fail (printf "searcher.openai.url %s is given and searcher.openai.weights.volume is empty: the server reads weights as files that the searcher writes; name a volume that both mount" $openai.url) }}
{{- end }}
{{- if gt (int $searcher.gpu.count) 0 }}
{{- fail (printf "searcher.gpu.count is %d and searcher.openai.url %s is given: the server has the GPUs, and a searcher would keep others idle; set it to 0" (int $searcher.gpu.count) $openai.url) }}
{{- end }}
{{- else if or $openai.token.existingSecret $openai.weights.volume $openai.weights.pathAtServer }}
{{- fail "searcher.openai has a token or weights and no url: nothing would use them; give the address of the server, or remove them" }}
{{- /* without searchers the run is offline, and nothing asks a server */}}
{{- else if and (gt (int $searcher.replicas) 0) (regexMatch (printf "%sengine[\"']?[ \t]*=[ \t]*[\"']openai[\"']" (include "tba.searcherKey" .)) $text) }}
{{- fail "searcher.engine of the recipe is \"openai\" and searcher.openai.url is empty: the chart would let searchers reach no server; give its address there" }}
{{- end }}
{{- if include "tba.sharedServer" . }}
{{- $scaling := .Values.scaling }}
{{- $why := printf "all searchers would load weights into the server %s; set it to 1, or install further searchers (searchersOnly) with servers of their own, or give each pod a server at localhost" $openai.url }}
{{- if gt (int $searcher.replicas) 1 }}
{{- fail (printf "searcher.replicas is %d, and %s" (int $searcher.replicas) $why) }}
{{- end }}
{{- if and (eq $scaling.backend "keda") (gt (int $scaling.keda.maxReplicas) 1) }}
{{- fail (printf "scaling.keda.maxReplicas is %d, and %s" (int $scaling.keda.maxReplicas) $why) }}
{{- end }}
{{- end }}
{{- end }}

{{- define "tba.validate.routes" -}}
{{- if and .Values.buffer.ingress.enabled (not .Values.buffer.ingress.hosts) }}
{{- fail "buffer.ingress.enabled is true and buffer.ingress.hosts is empty: every name would lead to the run; give its name" }}
{{- end }}
{{- end }}

{{- define "tba.validate.pods" -}}
{{- $searcher := .Values.searcher }}
{{- if lt (int $searcher.terminationGracePeriodSeconds) (add (int $searcher.drainS) 10 | int) }}
{{- fail (printf "searcher.terminationGracePeriodSeconds %d is less than searcher.drainS %d and 10 more: finished rollouts would be lost; raise it" (int $searcher.terminationGracePeriodSeconds) (int $searcher.drainS)) }}
{{- end }}
{{- range list "emptyDir" "ephemeral" }}
{{- if hasKey $searcher.weightCache.volume . }}
{{- fail (printf "searcher.weightCache.volume is an %s, which belongs to one pod, so searchers would share nothing; name a hostPath or a claim, or remove it" .) }}
{{- end }}
{{- end }}
{{- range $component := list "reward" "searcher" "trainer" }}
{{- $gpu := (index $.Values $component).gpu }}
{{- if and (gt (int $gpu.count) 0) (not $gpu.resource) }}
{{- fail (printf "%s.gpu.count is %d and %s.gpu.resource is empty; name the resource, for example nvidia.com/gpu" $component (int $gpu.count) $component) }}
{{- end }}
{{- end }}
{{- if not .Values.serviceAccounts.create }}
{{- range $component := include "tba.components" . | splitList " " }}
{{- if not (get $.Values.serviceAccounts.names $component) }}
{{- fail (printf "serviceAccounts.create is false and serviceAccounts.names has no %s; name a ServiceAccount of yours" $component) }}
{{- end }}
{{- end }}
{{- end }}
{{- if and .Values.setup.prepare (not .Values.setup.enabled) }}
{{- fail "setup.prepare is true and setup.enabled is false: nothing would be fetched; set setup.enabled to true, or setup.prepare to false" }}
{{- end }}
{{- if and (not .Values.setup.prepare) .Values.setup.hubToken.existingSecret }}
{{- fail "setup.hubToken is for setup.prepare, which is false: nothing would use the token; set setup.prepare to true or remove it" }}
{{- end }}
{{- range $component := list "trainer" "setup" "test" "stop" }}
{{- if (include "tba.podValues" (dict "root" $ "component" $component) | fromYaml).extraContainers }}
{{- fail (printf "extraContainers of %s: it is done when all its containers are, and a sidecar never is; give it in extraInitContainers with restartPolicy Always (Kubernetes 1.29), and [] here" $component) }}
{{- end }}
{{- end }}
{{- range $component := list "buffer" "reward" "searcher" "trainer" "setup" "redis" "objectstore" "test" "stop" }}
{{- range (include "tba.podValues" (dict "root" $ "component" $component) | fromYaml).extraVolumes }}
{{- if has .name (list "recipe" "tokens" "tmp" "tls" "ca" "store-ca" "redis-password" "password" "models" "data" "shm" "script" "weight-cache" "openai-weights") }}
{{- fail (printf "extraVolumes of %s has a volume %s, as the chart has; give it another name" $component .name) }}
{{- end }}
{{- end }}
{{- end }}
{{- end }}
