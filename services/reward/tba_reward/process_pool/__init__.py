"""Worker processes that can be killed: a pool gives each one job at a time.

service: pool.py -> worker_handle.py ==job, reply==> worker_main.py
"""
