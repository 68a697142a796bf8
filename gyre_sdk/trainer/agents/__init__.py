"""The agents' process: runs go on in it, apart from the trainer. `host` is the process, `client` the trainer's side."""
