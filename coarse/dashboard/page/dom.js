/* Elements that are kept from one sample to the next, so that focus, selection and screen readers stay where they are. */

const SVG = "http://www.w3.org/2000/svg";

/** An HTML element with classes and text. */
export function html(tag, classes = "", text = "") {
  const element = document.createElement(tag);
  if (classes) element.className = classes;
  if (text) element.textContent = text;
  return element;
}

/** An SVG element with attributes. */
export function svg(tag, attributes = {}) {
  return set(document.createElementNS(SVG, tag), attributes);
}

export function set(element, attributes) {
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  return element;
}

export function say(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

/** Makes the children of `parent` those of `items`, in their order: makes new ones, updates all, removes others. */
export function keep(parent, items, keyOf, make, update) {
  const before = new Map([...parent.children].map((child) => [child.dataset.key, child]));
  items.forEach((item, place) => {
    const key = String(keyOf(item, place));
    let child = before.get(key);
    if (child === undefined) {
      child = make(item);
      child.dataset.key = key;
    }
    before.delete(key);
    update(child, item, place);
    if (parent.children[place] !== child) parent.insertBefore(child, parent.children[place] ?? null);
  });
  while (parent.children.length > items.length) parent.lastElementChild.remove(); // by place: items may share a key
}
