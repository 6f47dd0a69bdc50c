"""Worker processes that can be killed: a fork server starts them, a pool gives them jobs.

service: pool.py -> fork_server_client.py --orders--> fork_server.py --fork--> worker_main.py
         pool.py -> worker_handle.py ==================jobs, replies=========> worker_main.py
"""
