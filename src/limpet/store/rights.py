"""Rights that a role lacks, as its server tells it: which GRANT gives them. Text to text; nothing here runs.

A role needs the rows of every table, and temporary ones of its own. It need not make tables: `limpet migrate --print FILE`
prints what somebody else may run.
"""

from __future__ import annotations

import re

#: What every role that works needs of the tables.
ROWS = "SELECT, INSERT, UPDATE, DELETE"

#: How tables are made for a role that may not.
PRINTED = "`limpet migrate --print FILE` prints the SQL that makes or widens the tables of a spider, for a role that may"

#: What PostgreSQL says to a client that it does not let in, where another attempt would hear the same.
_DOOR = re.compile(
    r"password authentication failed|no password supplied|role \"[^\"]*\" does not exist|database \"[^\"]*\" does not exist"
    r"|permission denied for database|no pg_hba\.conf entry|is not permitted to log in|definition of service .* not found"
)

#: The same of MySQL and MariaDB, by number: this user, this database, this way of logging in; no such database; a locked account.
MYSQL_DOOR = frozenset({1044, 1045, 1049, 1251, 1698, 3118, 4151})
#: Denied: a command on a table, a column, a routine; a privilege of the server; a temporary table.
MYSQL_DENIED = frozenset({1044, 1142, 1143, 1227, 1370})


def refused_at_the_door(told: str, *, role: str) -> str:
    """What to do where PostgreSQL says that user, password or database are wrong; "" where it is only away.

    >>> refused_at_the_door('FATAL: permission denied for database "crawl"', role="me"), refused_at_the_door("refused", role="me")
    ('it takes GRANT CONNECT ON DATABASE "crawl" TO "me"', '')
    """
    if not _DOOR.search(told):
        return ""
    closed = re.search(r"permission denied for database (\"[^\"]*\")", told)
    if closed:
        return f'it takes GRANT CONNECT ON DATABASE {closed[1]} TO "{role}"'
    return "a password is taken from PGPASSFILE, a service file or PGPASSWORD" if "password" in told else "check the address"


def postgres_grant(told: str, *, role: str, database: str) -> str:
    """What a role of PostgreSQL lacks, and what gives it.

    >>> postgres_grant("permission denied for table task", role="me", database="crawl")
    'GRANT SELECT, INSERT, UPDATE, DELETE ON ALL TABLES IN SCHEMA public TO "me"'
    >>> postgres_grant('permission denied to create temporary tables in database "crawl"', role="me", database="crawl")
    'GRANT TEMPORARY ON DATABASE "crawl" TO "me"'
    """
    if "temporary" in told:
        return f'GRANT TEMPORARY ON DATABASE "{database}" TO "{role}"'
    schema = re.search(r"for schema \"?(\w+)", told)
    if schema or "no schema has been selected" in told:
        return f'GRANT USAGE ON SCHEMA "{schema[1] if schema else "public"}" TO "{role}"; {PRINTED}'
    if "must be owner" in told:
        return PRINTED
    if "permission denied for function" in told:
        return f'GRANT pg_monitor TO "{role}"'
    return f'GRANT {ROWS} ON ALL TABLES IN SCHEMA public TO "{role}"'


def mysql_grant(told: str, *, database: str) -> str:
    """The same of MySQL and MariaDB, which name the user in what they say.

    >>> mysql_grant("INSERT command denied to user 'me'@'10.0.0.1' for table `crawl`.`task`", database="crawl")
    "GRANT SELECT, INSERT, UPDATE, DELETE, CREATE TEMPORARY TABLES ON `crawl`.* TO 'me'@'10.0.0.1'"
    >>> mysql_grant("CREATE command denied to user 'me'@'%' for table `crawl`.`task`", database="crawl").startswith("`limpet migrate")
    True
    """
    if re.search(r"\b(CREATE|ALTER|DROP|INDEX|CREATE VIEW|REFERENCES)(, \w+)* command denied", told):
        return PRINTED
    if "PROCESS" in told:
        return "GRANT PROCESS ON *.*"
    user = re.search(r"user ('[^']*'@'[^']*')", told)
    return f"GRANT {ROWS}, CREATE TEMPORARY TABLES ON `{database}`.* TO {user[1] if user else 'this user'}"
