"""The HTTP endpoints by what they are about; app.py puts their routers together."""
