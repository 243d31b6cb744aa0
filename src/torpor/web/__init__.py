"""What server and router share of HTTP: error shape, listening socket, uvicorn loop, limits, streams that end with the client."""
