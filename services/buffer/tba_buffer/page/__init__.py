"""The live page: files that a browser loads once; everything that it shows it asks the REST endpoints for."""
