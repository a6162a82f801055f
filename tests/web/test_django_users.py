"""The function for users of Django in docs/operations/access.md, with Django's own users and sessions."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

PAGE = Path(__file__).parents[2] / "docs" / "operations" / "access.md"
BEFORE = """
import sys, types
import django
from django.conf import settings

apps = ["django.contrib.auth", "django.contrib.contenttypes", "django.contrib.sessions"]
database = {"ENGINE": "django.db.backends.sqlite3", "NAME": ":memory:"}
settings.configure(DATABASES={"default": database}, INSTALLED_APPS=apps, SECRET_KEY="of a test")
django.setup()
"""
AFTER = """
from django.contrib.auth import BACKEND_SESSION_KEY, HASH_SESSION_KEY, SESSION_KEY
from django.contrib.auth.models import User
from django.core.management import call_command

call_command("migrate", verbosity=0)
known = {name: User.objects.create_user(name, is_staff=name != "joe") for name in ("ann", "joe", "kim", "eve")}
known["root"] = User.objects.create_superuser("root")
sessions = {}
for name, one in known.items():
    own = import_module(settings.SESSION_ENGINE).SessionStore()
    own[SESSION_KEY], own[HASH_SESSION_KEY] = str(one.pk), one.get_session_auth_hash()
    own[BACKEND_SESSION_KEY] = "django.contrib.auth.backends.ModelBackend"
    own.save()
    sessions[name] = own.session_key
known["kim"].set_password("another")
known["kim"].save()
User.objects.filter(username="eve").update(is_active=False)

def asked(key):
    return user(types.SimpleNamespace(cookies={"sessionid": key} if key else {}))

found = {name: asked(key) for name, key in sessions.items()}
assert found == {"ann": ("ann", "viewer"), "root": ("root", "admin"), "joe": None, "kim": None, "eve": None}, found
assert asked(None) is asked("x" * 32) is None
"""


def test_the_function_of_the_page_lets_in_whom_django_lets_in() -> None:
    (code,) = re.findall(r"```python fragment\n(.*?)```", PAGE.read_text(), re.DOTALL)
    done = subprocess.run([sys.executable, "-c", BEFORE + code + AFTER], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
