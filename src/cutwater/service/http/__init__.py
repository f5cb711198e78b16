"""What the service knows of HTTP: listening, heads, arguments, bodies, cookies, and problems as answers.

Not here: routes and what they answer.
"""
