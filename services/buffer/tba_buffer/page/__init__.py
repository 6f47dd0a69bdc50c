"""The live page: static files that a browser loads once; the page fetches all data from the REST endpoints."""
