"""Golden data for chat templates: what transformers' apply_chat_template (Jinja2) makes of conversations. Used by tokenizer_golden.py."""
import datetime
import json

import transformers.utils.chat_template_utils as chat_template_utils
from transformers import PreTrainedTokenizerFast

NOW = datetime.datetime(2024, 7, 5, 9, 3, 7)

TOOLS = [
    {"type": "function", "function": {"name": "get_weather", "description": "Wetter für \"Köln\" <b>&\n天气", "parameters": {"type": "object", "properties": {
        "city": {"type": "string", "description": "Ort é"}, "unit": {"type": "string", "enum": ["C", "F"]},
        "nested": {"type": "object", "properties": {"deep": {"type": ["array", "null"], "default": [], "minItems": 0}}}, "t": {"type": "number", "default": 0.5, "min": 1e-07}}, "required": ["city"]}}},
    {"type": "function", "function": {"name": "now", "description": "", "parameters": {"type": "object", "properties": {}}}},
]


def user(content):
    return {"role": "user", "content": content}


def assistant(content, **more):
    return {"role": "assistant", "content": content, **more}


def system(content):
    return {"role": "system", "content": content}


def call(name, arguments):
    return {"type": "function", "function": {"name": name, "arguments": arguments}}


THOUGHT = assistant("<think>\n hmm, 2+2\n</think>\n\n4")
WEATHER = assistant("", tool_calls=[call("get_weather", {"city": "Köln", "unit": None, "ok": True, "x": 1.5})])
CHATS = [
    {"messages": [user("Hello")]},
    {"messages": [user("  Hi é 😸\n ")], "add_generation_prompt": False},
    {"messages": [system(" Be brief.\n"), user("a"), assistant(" b "), user("<|im_end|> <|eot_id|> c")]},
    {"messages": [user("2+2?"), THOUGHT, user("and 3+3?")]},
    {"messages": [user("2+2?"), THOUGHT], "add_generation_prompt": False},
    {"messages": [user("2+2?"), assistant("4", reasoning_content=" easy\n"), user("ok")], "enable_thinking": False},
    {"messages": [user("q")], "enable_thinking": True},
    {"messages": [system("s"), user("Weather?")], "tools": TOOLS},
    {"messages": [user("Weather?"), WEATHER, {"role": "tool", "content": '{"t": 20}'}, {"role": "tool", "content": "ok"}], "tools": TOOLS},
    {"messages": [user("Weather?"), WEATHER, {"role": "tool", "content": "20"}, assistant("It is 20."), user("Thanks")], "tools": TOOLS},
    {"messages": [system("s"), user("q")], "tools": TOOLS, "tools_in_user_message": False, "date_string": "1 Jan 2030"},
    {"messages": [user("")]},
]

# In the manner of Llama 3.1's template, with all its features.
LLAMA_STYLE = r"""{{- bos_token }}
{%- if custom_tools is defined %}
    {%- set tools = custom_tools %}
{%- endif %}
{%- if not tools_in_user_message is defined %}
    {%- set tools_in_user_message = true %}
{%- endif %}
{%- if not date_string is defined %}
    {%- if strftime_now is defined %}
        {%- set date_string = strftime_now("%d %b %Y") %}
    {%- else %}
        {%- set date_string = "26 Jul 2024" %}
    {%- endif %}
{%- endif %}
{%- if messages[0]['role'] == 'system' %}
    {%- set system_text = messages[0]['content']|trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system_text = "" %}
{%- endif %}
{{- "<|start_header_id|>system<|end_header_id|>\n\nToday: " + date_string + "\n\n" }}
{%- if tools is not none and not tools_in_user_message %}
    {{- "Answer with a JSON call of one of:\n" }}
    {%- for t in tools %}
        {{- t | tojson(indent=4) }}
        {{- "\n\n" }}
    {%- endfor %}
{%- endif %}
{{- system_text + "<|eot_id|>" }}
{%- if tools_in_user_message and not tools is none %}
    {%- if messages | length != 0 %}
        {%- set first = messages[0]['content']|trim %}
        {%- set messages = messages[1:] %}
    {%- else %}
        {{- raise_exception("No user message to put the tools into") }}
    {%- endif %}
    {{- '<|start_header_id|>user<|end_header_id|>\n\nFunctions:\n' -}}
    {%- for t in tools %}
        {{- t | tojson(indent=4) }}
        {{- "\n\n" }}
    {%- endfor %}
    {{- first + "<|eot_id|>" }}
{%- endif %}
{%- for message in messages %}
    {%- if not (message.role == 'ipython' or message.role == 'tool' or 'tool_calls' in message) %}
        {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n' + message['content'] | trim + '<|eot_id|>' }}
    {%- elif 'tool_calls' in message %}
        {%- if not message.tool_calls|length == 1 %}
            {{- raise_exception("One call at a time") }}
        {%- endif %}
        {%- set tool_call = message.tool_calls[0].function %}
        {{- '<|start_header_id|>assistant<|end_header_id|>\n\n{"name": "' + tool_call.name + '", "parameters": ' }}
        {{- tool_call.arguments | tojson }}
        {{- "}<|eot_id|>" }}
    {%- elif message.role == "tool" or message.role == "ipython" %}
        {{- "<|start_header_id|>ipython<|end_header_id|>\n\n" }}
        {%- if message.content is mapping or message.content is iterable %}
            {{- message.content | tojson }}
        {%- else %}
            {{- message.content }}
        {%- endif %}
        {{- "<|eot_id|>" }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\n\n' }}
{%- endif %}
"""

TWO_USERS = [user("a"), user("b")]
SNIPPETS = [
    "{% set ns=namespace(i=0, seen=[]) %}{% for m in messages %}{% set ns.i = ns.i + 1 %}{% set x = ns.i %}{% endfor %}{{ ns.i }}|{{ x }}|{{ ns.missing }}",
    "{{ tools|tojson(indent=2) }}\n{{ tools|tojson }}\n{{ tools[0]|tojson(separators=(',', ':'), sort_keys=true) }}\n{{ tools|tojson(ensure_ascii=true) }}\n{{ {}|tojson(indent=2) }}{{ []|tojson(indent=1) }}",
    "{{ strftime_now('%Y') }} {{ strftime_now('%d %b %Y') }} {{ strftime_now('%A, %-d %B %y %H:%M:%S %j %p %I %% %U %W %w') }}",
    "{% for m in messages %}{% if loop.previtem is defined and loop.previtem.role == m.role %}{{ raise_exception('roles must alternate') }}{% endif %}{% endfor %}",
    "{% macro turn(m, end='<end>') %}[{{ m.role }}] {{ m.content }}{{ end }}{% endmacro %}{% for m in messages %}{{ turn(m) }}{{ turn(m, end='|') }}{% endfor %}",
    "{% macro wrap() %}<{{ caller('x') }}>{% endmacro %}{% call(a) wrap() %}{{ a }}-{{ messages|length }}{% endcall %}",
    "{% for x in [1,2,3,4] %}{{ loop.index }}{{ loop.index0 }}{{ loop.revindex }}{{ loop.revindex0 }}{{ loop.first }}{{ loop.last }}{{ loop.length }}{{ loop.cycle('a','b') }}{{ loop.changed(x // 2) }}{{ loop.nextitem }},{% else %}none{% endfor %}",
    "{% for x in [] %}x{% else %}empty{% endfor %}{% for x in [1,2,3,4,5] if x is odd %}{{ x }}{% if x == 3 %}!{% break %}{% endif %}{% continue %}z{% endfor %}",
    "{% for k, v in tools[0].function.parameters.properties.items() %}{{ k }}={{ v.type }};{% endfor %}{{ tools[0].function|items|list|length }}",
    "{{ none }} {{ true }} {{ 1.0 }} {{ 10000000000000000.0|default(3) }} {{ 0.00001 }} {{ [1, 'a', none, 1.5, {'k': 'v\\'s'}] }} {{ ('a',) }} {{ 'é\n' }} {{ ['é\n\u200b'] }} {{ 7 // 2 }} {{ -7 // 2 }} {{ -7 % 3 }} {{ 7 / 2 }} {{ 2 ** 3 }}",
    "  {% if true %}\n  a\n    {% endif %}\n\n  {%- if true -%}\n b \n{% endif %} c\n{# comment #}\n  {# c2 #}  d\n{{ 'x' }}\n\n",
    "{% if true +%}\n keep{% endif %}\n  {%+ if true %}indent{% endif %}\n{% raw %}{{ raw }} {% if %}{% endraw %}\n{% generation %}gen{% endgeneration %}!",
    "{{ '  a b\t\n'.strip() }}|{{ 'xxaxx'.strip('x') }}|{{ '\n\n a \n'.lstrip('\n') }}|{{ 'a,b,,c'.split(',') }}|{{ ' a  b '.split() }}|{{ 'a.b.c'.rsplit('.', 1) }}|{{ 'abc'.replace('b', 'é', 1) }}|{{ 'ab'.upper() }}{{ 'it\\'s me'.title() }}{{ 'aBC'.capitalize() }}",
    "{{ 'abc'[1:] }}{{ 'a😸c'[1] }}{{ 'a😸c'[::-1] }}{{ 'a😸c'|length }}{{ [1,2,3][-1] }}{{ [1,2,3][:2] }}{{ messages[-1]['content'] }}{{ 'abc'.startswith(('x', 'a')) }}{{ 'abc'.find('c') }}{{ 'x=%s' % 3 }}{{ '{}-{k}'.format(1, k=2) }}",
    "{{ messages|map(attribute='role')|join('+') }} {{ messages|selectattr('role', 'equalto', 'user')|list|length }} {{ [3,1,2]|sort|join }} {{ ['b','A']|sort(reverse=true) }} {{ [1,2]|sum }} {{ {'b':1,'a':2}|dictsort }} {{ x|default('d') }} {{ ''|default('e', true) }} {{ 'a\nb'|indent(2) }} {{ [1,1,2]|unique|list }} {{ 'x'|upper ~ 1 ~ none }}",
    "{{ 4 is divisibleby(2) }} {{ 'a' is in ['a'] }} {{ 3 is not divisibleby 2 }} {{ x is defined }} {{ messages is sequence }} {{ tools is mapping }} {{ 'a' is string and 1 is number }} {{ none is none }} {{ 1 == 1.0 }} {{ [1] == [1] }} {{ 'a' in 'abc' and 'k' in {'k': 1} and 2 not in [1] }} {{ 1 is eq 1 }}",
    "{% set a %}block {{ messages|length }}{% endset %}[{{ a }}]{% set b, c = 1, 2 %}{{ b }}{{ c }}{% filter upper %}abc{% endfilter %}{{ 'y' if false }}{{ 'n' if false else 'z' }}{% if not x %}u{% endif %}",
    "{{ bos_token }}{{ eos_token }}{{ unk_token is defined }}{{ messages[0].missing is defined }}{{ messages[0].get('missing', 'g') }}{{ messages[0].items()|list|length }}{{ dict(a=1).a }}{{ range(3)|list }}",
    "{{ messages[0].missing.deeper }}",
    "{{ missing_function() }}",
    "{{ 'a' + 1 }}",
    "{% set l = [1] %}{{ l.append(2) }}",
]


class FixedClock(datetime.datetime):
    @classmethod
    def now(cls, tz=None):
        return NOW


def outcome(render):
    try:
        return {"text": render()}
    except Exception as error:  # noqa: BLE001: the text of the error is the golden datum
        return {"error": str(error), "raised": type(error).__name__ == "TemplateError"}


def template_golden(sources):
    chat_template_utils.datetime = FixedClock
    configs = {name: json.loads((path / "tokenizer_config.json").read_text()) for name, path in sources.items()}
    cases = []
    for name, source in [*((name, config["chat_template"]) for name, config in configs.items()), ("llama3_1_style", LLAMA_STYLE)]:
        cases += [{"template": name, "params": {"add_generation_prompt": True, **chat}} for chat in CHATS]
    cases += [{"template": snippet, "params": {"messages": [system("s"), *TWO_USERS] if "{{ caller" not in snippet else TWO_USERS, "tools": TOOLS, "add_generation_prompt": True}} for snippet in SNIPPETS]
    fast = {}
    for case in cases:
        name = case["template"]
        if name not in fast:
            base = name if name in configs else "llama3_1"
            config = configs[base]
            source = config["chat_template"] if name in configs else LLAMA_STYLE if name == "llama3_1_style" else name
            tokens = {key: config[key] for key in ("bos_token", "eos_token", "unk_token", "pad_token") if isinstance(config.get(key), str)}
            fast[name] = PreTrainedTokenizerFast(tokenizer_file=str(sources[base] / "tokenizer.json"), chat_template=source, **tokens)
        params = dict(case["params"])
        messages = params.pop("messages")
        case["expected"] = outcome(lambda: fast[name].apply_chat_template(messages, tokenize=False, **params))
    return {"now": [NOW.year, NOW.month - 1, NOW.day, NOW.hour, NOW.minute, NOW.second], "llama3_1_style": LLAMA_STYLE, "cases": cases}
