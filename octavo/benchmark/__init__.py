"""`octavo bench`: how fast a loaded model is, beside what this machine could do at most.

`offline` measures whole runs; `kernels` every op of the program at chosen shapes; `step` where the
time of real steps goes; `roofline` does the arithmetic that they share. `serve` puts load on any
server, with its own client (`wire`, `load`).
"""
