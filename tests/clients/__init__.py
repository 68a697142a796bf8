"""Real agent programs as test inputs: how they are installed, run, scripted and recorded."""
