"""The scheduler of the engine, over an executor that only says how long a step would take.

The same `Scheduler`, `BlockManager` and policies run here as in the server; time is virtual. What
this room adds is hardware as data, workloads, executors that answer with predicted durations, a
fleet of replicas on an event heap, and reports.
"""
