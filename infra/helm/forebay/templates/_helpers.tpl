{{/* Name of the release's objects, followed by the name of a process. */}}
{{- define "forebay.name" -}}
{{ contains "forebay" .Release.Name | ternary .Release.Name (printf "%s-forebay" .Release.Name) | trunc 40 | trimSuffix "-" }}
{{- end }}

{{/* Labels that select the pods of one process: (list $ NAME). */}}
{{- define "forebay.selector" -}}
app.kubernetes.io/instance: {{ (index . 0).Release.Name }}
forebay/process: {{ index . 1 }}
{{- end }}

{{/* Labels of all objects: (list $ NAME ROLE). Prometheus takes the name of the job from the component. */}}
{{- define "forebay.labels" -}}
{{ include "forebay.selector" . }}
app.kubernetes.io/name: forebay
app.kubernetes.io/component: {{ index . 2 }}
{{- end }}

{{/* Metadata of an object: (list $ NAME ROLE). */}}
{{- define "forebay.metadata" -}}
{{- $ := index . 0 -}}
name: {{ include "forebay.name" $ }}-{{ index . 1 }}
namespace: {{ $.Release.Namespace }}
labels:
  {{- include "forebay.labels" . | nindent 2 }}
  app.kubernetes.io/managed-by: {{ $.Release.Service }}
  helm.sh/chart: {{ $.Chart.Name }}-{{ $.Chart.Version }}
{{- end }}

{{/* Each of `workers`, with the defaults of `worker`. */}}
{{- define "forebay.workers" -}}
{{- $workers := dict }}
{{- range $name, $settings := .Values.workers }}
{{- $worker := mergeOverwrite (deepCopy $.Values.worker) ($settings | default dict) (dict "role" "worker") }}
{{- if and $worker.planned (eq $worker.kind "LeaderWorkerSet") }}
{{- fail (printf "workers.%s: the planner cannot scale a LeaderWorkerSet; remove `planned`" $name) }}
{{- end }}
{{- $_ := set $workers $name $worker }}
{{- end }}
{{- toYaml $workers }}
{{- end }}

{{/* All processes, as a map of NAME to settings: the roles that are enabled, and worker-NAME for each of `workers`. */}}
{{- define "forebay.processes" -}}
{{- $processes := dict }}
{{- range $role, $settings := .Values.roles }}
{{- if $settings.enabled }}
{{- $_ := set $processes $role (merge (dict "role" $role "kind" "Deployment") $settings) }}
{{- end }}
{{- end }}
{{- range $name, $worker := include "forebay.workers" . | fromYaml }}
{{- $_ := set $processes (printf "worker-%s" $name) $worker }}
{{- end }}
{{- with $processes.supervisor }}
{{- $_ := set . "files" (dict "supervise.toml" (include "forebay.supervise" $)) }}
{{- end }}
{{- toYaml $processes }}
{{- end }}

{{/* Pool and group (model) of a worker, as `forebay worker` derives them from its options. */}}
{{- define "forebay.pool" -}}
{{ .pool | default (eq (.role | default "aggregated") "aggregated" | ternary "default" .role) }}
{{- end }}
{{- define "forebay.group" -}}
{{ index . "model-name" | default .model | default "forebay-default" }}
{{- end }}

{{/* File of `forebay planner supervise`. */}}
{{- define "forebay.supervise" -}}
actuator = "kubernetes"
{{- range $name, $worker := include "forebay.workers" . | fromYaml }}
{{- if $worker.planned }}

[[pools]]
group = {{ include "forebay.group" $worker.options | quote }}
pool = {{ include "forebay.pool" $worker.options | quote }}
{{ lower $worker.kind }} = "{{ $.Release.Namespace }}/{{ include "forebay.name" $ }}-worker-{{ $name }}"
{{- end }}
{{- end }}
{{- end }}

{{/* Command-line options. Numbers are printed as JSON, because large ones would get an exponent otherwise. */}}
{{- define "forebay.options" -}}
{{- range $name, $value := . }}
{{- if kindIs "bool" $value }}
- --{{ $value | ternary "" "no-" }}{{ $name }}
{{- else }}
{{- range kindIs "slice" $value | ternary $value (list $value) }}
{{- if kindIs "string" . }}
- {{ printf "--%s=%s" $name . | quote }}
{{- else if not (kindIs "invalid" .) }}
- {{ printf "--%s=%s" $name (toJson .) | quote }}
{{- end }}
{{- end }}
{{- end }}
{{- end }}
{{- end }}

{{/* Ports of a process, as a map of names to numbers: of its options, and `ports`. */}}
{{- define "forebay.ports" -}}
{{- $ports := .ports | default dict | deepCopy }}
{{- with .options.port }}{{ $_ := set $ports $.portName . }}{{ end }}
{{- with index .options "metrics-port" }}{{ $_ := set $ports "metrics" . }}{{ end }}
{{- toYaml $ports }}
{{- end }}

{{- define "forebay.image" -}}
{{ contains ":" (last (splitList "/" .image)) | ternary .image (printf "%s:%s" .image .tag) }}
{{- end }}

{{/* Fields of every container: (list $ PROCESS), with `role`, `command`, `options` and other settings. */}}
{{- define "forebay.container" -}}
{{- $ := index . 0 }}
{{- $process := index . 1 -}}
image: {{ include "forebay.image" (dict "image" ($process.image | default $.Values.image) "tag" $.Chart.AppVersion) }}
imagePullPolicy: {{ $.Values.imagePullPolicy }}
args:
  {{- toYaml $process.command | nindent 2 }}
  {{- include "forebay.options" $process.options | trim | nindent 2 }}
env:
  - {name: POD_NAME, valueFrom: {fieldRef: {fieldPath: metadata.name}}}
  - {name: POD_IP, valueFrom: {fieldRef: {fieldPath: status.podIP}}}
  - {name: HOME, value: /tmp} # libraries keep caches there
  - {name: USER, value: forebay}
  - {name: FOREBAY_NAMESPACE, value: {{ $.Values.namespace | quote }}}
  - {name: FOREBAY_KAFKA, value: {{ include "forebay.kafka" $ | quote }}}
  {{- if $.Values.kafkaUsers }}
  - {name: FOREBAY_KAFKA_CONFIG, value: /etc/forebay/secrets/kafka/kafka.properties}
  {{- end }}
  {{- if $.Values.redisSecret }}
  - {name: FOREBAY_REDIS, valueFrom: {secretKeyRef: {name: {{ $.Values.redisSecret }}, key: url}}}
  {{- else }}
  - {name: FOREBAY_REDIS, value: {{ include "forebay.redis" $ | quote }}}
  {{- end }}
  {{- range $name, $value := $process.env }}
  - {name: {{ $name }}, value: {{ $value | quote }}}
  {{- end }}
resources:
  {{- toYaml $process.resources | nindent 2 }}
securityContext:
  {{- $context := include "forebay.securityContext" . | fromYaml }}
  {{- toYaml (mergeOverwrite $context ($process.securityContext | default dict)) | nindent 2 }}
volumeMounts:
  - {name: tmp, mountPath: /tmp}
  {{- if $process.files }}
  - {name: files, mountPath: /etc/forebay/files, readOnly: true}
  {{- end }}
  {{- range $name, $secret := include "forebay.secrets" . | fromYaml }}
  - {name: secret-{{ $name }}, mountPath: /etc/forebay/secrets/{{ $name }}, readOnly: true}
  {{- end }}
  {{- range $name, $volume := merge (dict) ($process.volumes | default dict) ($process.claims | default dict) }}
  - {name: {{ $name }}, mountPath: {{ $volume.mountPath }}}
  {{- end }}
{{- end }}

{{- define "forebay.securityContext" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities:
  drop: [ALL]
  {{- if (index . 1).ipcLock }}
  add: [IPC_LOCK]
  {{- end }}
{{- end }}

{{/* Secrets of a process by their names in /etc/forebay/secrets: its own, and the user of Kafka of its role. */}}
{{- define "forebay.secrets" -}}
{{- $ := index . 0 }}
{{- $process := index . 1 }}
{{- $secrets := $process.secrets | default dict | deepCopy }}
{{- with $.Values.kafkaUsers }}
{{- $_ := set $secrets "kafka" (printf "%s-%s" . ($process.kafkaRole | default $process.role)) }}
{{- end }}
{{- toYaml $secrets }}
{{- end }}

{{/* Fields of every pod's spec: (list $ NAME PROCESS). */}}
{{- define "forebay.pod" -}}
{{- $ := index . 0 }}
{{- $name := index . 1 }}
{{- $process := index . 2 -}}
serviceAccountName: {{ eq $process.role "supervisor" | ternary (printf "%s-supervisor" (include "forebay.name" $)) "default" }}
automountServiceAccountToken: {{ eq $process.role "supervisor" }}
enableServiceLinks: false
{{- with $.Values.imagePullSecrets }}
imagePullSecrets:
  {{- toYaml . | nindent 2 }}
{{- end }}
securityContext:
  runAsNonRoot: true
  runAsUser: 65532
  runAsGroup: 65532
  fsGroup: 65532
  fsGroupChangePolicy: OnRootMismatch
  seccompProfile: {type: RuntimeDefault}
volumes:
  - {name: tmp, emptyDir: {}}
  {{- if $process.files }}
  - {name: files, configMap: {name: {{ include "forebay.name" $ }}-{{ $name }}}}
  {{- end }}
  {{- range $secretName, $secret := include "forebay.secrets" (list $ $process) | fromYaml }}
  - {name: secret-{{ $secretName }}, secret: {secretName: {{ $secret }}, defaultMode: 0440}}
  {{- end }}
  {{- range $volumeName, $volume := $process.volumes }}
  - name: {{ $volumeName }}
    {{- toYaml (omit $volume "mountPath") | nindent 4 }}
  {{- end }}
{{- with $process.pod }}
{{ toYaml . }}
{{- end }}
{{- end }}

{{/* Template of the pods of a process that serves: (list $ NAME PROCESS). */}}
{{- define "forebay.template" -}}
{{- $ := index . 0 }}
{{- $name := index . 1 }}
{{- $process := index . 2 -}}
metadata:
  labels:
    {{- include "forebay.labels" (list $ $name $process.role) | nindent 4 }}
  {{- with $process.files }}
  annotations: {forebay/files: {{ toJson . | sha256sum }}} # so that a changed file restarts the pods
  {{- end }}
spec:
  {{- include "forebay.pod" . | nindent 2 }}
  # 40 s: a process needs at most 34 s after its drain, to stop an engine and to close its connections.
  terminationGracePeriodSeconds: {{ add ($process.preStopSeconds | default 0) (index $process.options "drain-s" | default 0 | ceil) 40 }}
  topologySpreadConstraints:
    {{- range list "kubernetes.io/hostname" "topology.kubernetes.io/zone" }}
    - topologyKey: {{ . }}
      maxSkew: 1
      whenUnsatisfiable: ScheduleAnyway
      labelSelector:
        matchLabels:
          {{- include "forebay.selector" (list $ $name) | nindent 10 }}
    {{- end }}
  {{- with $process.server }}
  # It starts before the worker and ends after it, so that responses are finished while the worker drains.
  initContainers:
    - name: server
      restartPolicy: Always
      {{- toYaml . | nindent 6 }}
  {{- end }}
  containers:
    - name: forebay
      {{- include "forebay.container" (list $ $process) | nindent 6 }}
      {{- with include "forebay.ports" $process | fromYaml }}
      ports:
        {{- range $portName, $port := omit . "server" }}
        - {name: {{ $portName }}, containerPort: {{ $port }}}
        {{- end }}
      {{- end }}
      startupProbe:
        {{- toYaml $process.live | nindent 8 }}
        periodSeconds: 2
        failureThreshold: {{ div ($process.startupSeconds | default 120) 2 }}
      livenessProbe:
        {{- toYaml $process.live | nindent 8 }}
        periodSeconds: 10
        timeoutSeconds: 5
        failureThreshold: 6
      readinessProbe:
        {{- toYaml $process.ready | nindent 8 }}
        periodSeconds: 2
        timeoutSeconds: 2
        failureThreshold: 2
      {{- with $process.preStopSeconds }}
      lifecycle: {preStop: {sleep: {seconds: {{ . }}}}}
      {{- end }}
{{- end }}

{{- define "forebay.kafka" -}}
{{- if .Values.trial.enabled }}{{ include "forebay.name" . }}-redpanda:9092
{{- else }}{{ required "set `kafka` to the addresses of the brokers, as host:port" .Values.kafka }}{{ end }}
{{- end }}
{{- define "forebay.redis" -}}
{{- if .Values.trial.enabled }}redis://{{ include "forebay.name" . }}-redis:6379
{{- else }}{{ required "set `redis` to the URL of Redis, or `redisSecret` to a Secret with it" .Values.redis }}{{ end }}
{{- end }}
