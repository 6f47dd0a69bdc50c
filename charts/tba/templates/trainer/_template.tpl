{{/* The pods of the trainer. The name of the Job is made from this, since Kubernetes lets nobody change it in a Job. */}}
{{- define "tba.trainer.template" -}}
{{- $of := dict "root" . "component" "trainer" -}}
{{- $nodes := int .Values.trainer.nodes -}}
{{- $apart := dict -}}
{{- if gt $nodes 1 }}
{{- $term := dict "topologyKey" "kubernetes.io/hostname" "labelSelector" (dict "matchLabels" (include "tba.selector" $of | fromYaml)) }}
{{- $apart = dict "podAntiAffinity" (dict "requiredDuringSchedulingIgnoredDuringExecution" (list $term)) }}
{{- end -}}
metadata: {{- include "tba.podMetadata" $of | nindent 2 }}
spec:
  {{- include "tba.podBase" (merge (dict "affinity" $apart) $of) | nindent 2 }}
  # a new pod for each start: the logs of the old one stay, and failures can be told apart
  restartPolicy: Never
  {{- if gt $nodes 1 }}
  subdomain: {{ include "tba.fullname" . }}-trainer
  {{- end }}
  {{- include "tba.initContainers" $of | nindent 2 }}
  containers:
    - name: trainer
      {{- include "tba.containerBase" (merge (dict "image" "trainer") $of) | nindent 6 }}
      {{- include "tba.trainer.command" . | nindent 6 }}
      env: {{- include "tba.env" $of | nindent 8 }}
      {{- if gt $nodes 1 }}
      ports:
        - {name: rendezvous, containerPort: 29400, protocol: TCP}
      {{- else }}
      # the file is not there before the trainer has its model; what it waits for until then has deadlines of its own.
      # The other nodes of a larger trainer end by `trainer.collective_timeout_s` when one hangs
      {{- $command := list "sh" "-c" "! test -e /tmp/alive || test -n \"$(find /tmp/alive -mmin -5)\"" }}
      {{- $probe := dict "exec" (dict "command" $command) "periodSeconds" 60 "timeoutSeconds" 30 "failureThreshold" 3 }}
      livenessProbe: {{- toYaml (mergeOverwrite $probe .Values.trainer.livenessProbe) | nindent 8 }}
      {{- end }}
      resources: {{- include "tba.resources" .Values.trainer | nindent 8 }}
      volumeMounts: {{- include "tba.volumeMounts" (merge (dict "modelsReadOnly" true) $of) | nindent 8 }}
  volumes: {{- include "tba.volumes" $of | nindent 4 }}
{{- end }}

{{/* Processes of one pod. */}}
{{- define "tba.trainer.processes" -}}
{{ .Values.trainer.processesPerNode | default .Values.trainer.gpu.count | default 1 | int }}
{{- end }}

{{/* One process as the image starts it; several by torchrun, of one machine or of several. */}}
{{- define "tba.trainer.command" -}}
{{- $processes := include "tba.trainer.processes" . | int -}}
{{- $nodes := int .Values.trainer.nodes -}}
{{- if gt $nodes 1 -}}
command:
  - python
  - -m
  - tba_trainer.distributed.launch
  - {{ $processes | quote }}
  - --nodes
  - {{ $nodes | quote }}
  - --rendezvous
  - $(TRAINER_JOB)-0.{{ include "tba.fullname" . }}-trainer:29400
  - --config
  - /etc/tba/recipe.toml
{{- else if gt $processes 1 -}}
command: [python, -m, tba_trainer.distributed.launch, {{ $processes | quote }}, --config, /etc/tba/recipe.toml]
{{- else -}}
args: [--config, /etc/tba/recipe.toml]
{{- end }}
{{- end }}

{{/* What the trainer's processes have after SIGTERM, before Kubernetes kills the pod. */}}
{{- define "tba.trainer.stopTimeoutS" -}}
{{ sub (int .Values.trainer.terminationGracePeriodSeconds) 10 }}
{{- end }}

{{/* Which ends of a pod count against backoffLimit; Kubernetes knows of it since 1.26. */}}
{{- define "tba.trainer.failurePolicy" -}}
{{- if semverCompare ">=1.26-0" .Capabilities.KubeVersion.Version -}}
podFailurePolicy:
  rules:
    # moved or preempted: not the trainer's fault
    - action: Ignore
      onPodConditions: [{type: DisruptionTarget, status: "True"}]
    # stopped by SIGTERM before the run was over
    - action: Ignore
      onExitCodes: {containerName: trainer, operator: In, values: [143]}
    # fenced: a newer trainer owns the run
    - action: FailJob
      onExitCodes: {containerName: trainer, operator: In, values: [3]}
{{- end }}
{{- end }}

{{/* Made of all that nobody may change in a Job: a cluster that is upgraded to 1.26 gets another Job with the next release. */}}
{{- define "tba.trainer.jobName" -}}
{{- $fixed := printf "%s %v %s" (include "tba.trainer.template" .) .Values.trainer.nodes (include "tba.trainer.failurePolicy" .) -}}
{{ include "tba.fullname" . }}-trainer{{ if not .Values.trainer.fixedJobName }}-{{ $fixed | sha256sum | trunc 8 }}{{ end }}
{{- end }}
