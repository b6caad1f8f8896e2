"""`forebay trace`: play a workload into a running system over HTTP."""
